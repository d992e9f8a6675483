"""The sampling parameters of the running requests, in arrays indexed by slot.

It mirrors the slots of the request table; the choosing is the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.output import NewRequestData
from worker.runner.request_state import Int64Array

_MASK64 = (1 << 64) - 1


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """Parameters of the rows being sampled; all arrays are [rows]."""

    temperature: npt.NDArray[np.float32]
    top_k: Int64Array  # 0 is off
    top_p: npt.NDArray[np.float64]  # 1 is off
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint64]
    position: Int64Array  # outputs before the one being sampled
    masked_tokens: list[tuple[int, ...]]  # may not be sampled now


class SamplingTable:
    """Parameters of at most `max_num_seqs` requests.

    A request without a seed draws as with seed 0; seeds count modulo 2**64.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.uint64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._stop_tokens: list[tuple[int, ...]] = [()] * max_num_seqs

    def set(self, slot: int, request: NewRequestData) -> None:
        """Take over the parameters of the request that enters `slot`."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._seed[slot] = (sampling.seed or 0) & _MASK64
        self._choice[slot] = request.choice
        self._min_tokens[slot] = sampling.min_tokens
        eos = () if sampling.ignore_eos else request.eos_token_ids
        # A checkpoint may name an end token beyond its own vocabulary; it cannot occur.
        stops = {t for t in (*eos, *sampling.stop_token_ids) if 0 <= t < self._vocab_size}
        self._stop_tokens[slot] = tuple(sorted(stops))

    def rows(self, slots: Int64Array, num_outputs: Int64Array) -> SamplingRows:
        """Gather the rows of `slots`, which have `num_outputs` output tokens so far."""
        early = num_outputs < self._min_tokens[slots]
        return SamplingRows(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=num_outputs,
            masked_tokens=[
                self._stop_tokens[slot] if masked else ()
                for slot, masked in zip(slots, early, strict=True)
            ],
        )

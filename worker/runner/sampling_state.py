"""The sampling parameters of the running requests, in arrays indexed by slot.

It mirrors the slots of the request table and reads its tokens; the choosing is the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.frontend.sampling_params import SamplingParams
from engine.output import NewRequestData
from worker.runner.request_state import Int32Array, Int64Array, RequestTable

_MASK64 = (1 << 64) - 1


@dataclass(slots=True, frozen=True)
class Adjustments:
    """What a request asks to be done to its logits before a token is chosen."""

    allowed: Int64Array  # empty allows all
    bad_words: tuple[tuple[int, ...], ...]
    bias_tokens: Int64Array
    bias: npt.NDArray[np.float32]
    repetition: float  # 1 is off
    frequency: float
    presence: float


@dataclass(slots=True, frozen=True)
class AdjustedRow:
    """One row with adjustments: `tokens[:num_prompt]` are its prompt, the rest its outputs."""

    row: int
    adjustments: Adjustments
    tokens: Int32Array
    num_prompt: int


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """Parameters of the rows being sampled; all arrays are [rows]."""

    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]  # 0 is off
    top_k: Int64Array  # 0 is off
    top_p: npt.NDArray[np.float64]  # 1 is off
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint64]
    position: Int64Array  # outputs before the one being sampled
    masked: dict[int, Int64Array]  # row -> tokens that may not be sampled now
    adjusted: list[AdjustedRow]  # only rows with adjustments


class SamplingTable:
    """Parameters of the requests in `requests`, for a model with `vocab_size` tokens.

    A request without a seed draws as with seed 0; seeds count modulo 2**64.
    """

    def __init__(self, requests: RequestTable, *, vocab_size: int) -> None:
        max_num_seqs = len(requests.token_ids)
        self._requests = requests
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.uint64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs: list[int | None] = [None] * max_num_seqs
        self._num_prompt_logprobs: list[int | None] = [None] * max_num_seqs
        self._is_adjusted = np.zeros(max_num_seqs, np.bool_)
        self._adjustments: list[Adjustments | None] = [None] * max_num_seqs
        self._stop_tokens: list[Int64Array] = [np.empty(0, np.int64)] * max_num_seqs

    def set(self, slot: int, request: NewRequestData) -> None:
        """Take over the parameters of the request that enters `slot`."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._min_p[slot] = sampling.min_p
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._seed[slot] = (sampling.seed or 0) & _MASK64
        self._choice[slot] = request.choice
        self._min_tokens[slot] = sampling.min_tokens
        eos = () if sampling.ignore_eos else request.eos_token_ids
        # A checkpoint may name an end token beyond its own vocabulary; it cannot occur.
        stops = {t for t in (*eos, *sampling.stop_token_ids) if 0 <= t < self._vocab_size}
        self._stop_tokens[slot] = np.array(sorted(stops), np.int64)
        self._num_logprobs[slot] = sampling.logprobs
        self._num_prompt_logprobs[slot] = sampling.prompt_logprobs
        adjustments = self._adjustments[slot] = _adjustments(sampling)
        self._is_adjusted[slot] = adjustments is not None

    def rows(self, slots: Int64Array, num_outputs: Int64Array) -> SamplingRows:
        """Gather one row per entry of `slots`, each behind `num_outputs` output tokens.

        A slot may occur several times, as it does when drafts are verified: a row sees the first
        `num_outputs` outputs that stand in the request table, confirmed or not. So drafts must be
        in its `token_ids`, behind the confirmed tokens, before this is called.
        """
        early = np.flatnonzero(num_outputs < self._min_tokens[slots])
        return SamplingRows(
            temperature=self._temperature[slots],
            min_p=self._min_p[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=num_outputs,
            masked={int(row): self._stop_tokens[slots[row]] for row in early},
            adjusted=[
                self._adjusted_row(int(row), int(slots[row]), int(num_outputs[row]))
                for row in np.flatnonzero(self._is_adjusted[slots])
            ],
        )

    def num_logprobs(self, slots: Int64Array) -> list[int | None]:
        """Return how many alternatives each slot's outputs come with, None: no logprobs at all."""
        return [self._num_logprobs[slot] for slot in slots.tolist()]

    def num_prompt_logprobs(self, slots: Int64Array) -> list[int | None]:
        """Return the same for each slot's prompt."""
        return [self._num_prompt_logprobs[slot] for slot in slots.tolist()]

    def _adjusted_row(self, row: int, slot: int, num_outputs: int) -> AdjustedRow:
        adjustments = self._adjustments[slot]
        assert adjustments is not None
        num_prompt = int(self._requests.num_prompt_tokens[slot])
        tokens = self._requests.token_ids[slot, : num_prompt + num_outputs]
        return AdjustedRow(row, adjustments, tokens, num_prompt)


def _adjustments(sampling: SamplingParams) -> Adjustments | None:
    """Return what a request adjusts, None when it adjusts nothing."""
    adjusts = (
        sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )
    if not adjusts:
        return None
    return Adjustments(
        allowed=np.array(sampling.allowed_token_ids, np.int64),
        bad_words=sampling.bad_words,
        bias_tokens=np.array([token for token, _ in sampling.logit_bias], np.int64),
        bias=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        repetition=sampling.repetition_penalty,
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
    )

"""Chooses the next token of each row: greedy, or drawn after temperature, top-k and top-p.

A draw depends on (seed, choice, output position) alone: there is no generator state, so a request
draws the same alone, in a batch, after preemption and on another replica.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.runner.request_state import Int64Array
from worker.runner.sampling_state import SamplingRows

GREEDY_BELOW = 1e-5
"""Below this temperature a row is greedy (as in vLLM)."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def sample(logits: torch.Tensor, rows: SamplingRows) -> Int64Array:
    """Return one token id per row; logits [rows, vocab_size] float32, finite, left unchanged."""
    logits = _mask(logits, rows)
    tokens = logits.argmax(dim=-1)
    drawn = np.flatnonzero(rows.temperature >= GREEDY_BELOW)
    if len(drawn):
        index = torch.from_numpy(drawn)
        temperature = torch.from_numpy(rows.temperature[drawn])
        scaled = logits[index] / temperature[:, None]
        scaled = _truncate(scaled, rows.top_k[drawn], rows.top_p[drawn])
        numbers = uniform(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])
        tokens[index] = _draw(scaled, torch.from_numpy(numbers))
    result: Int64Array = tokens.numpy()
    return result


def uniform(
    seed: npt.NDArray[np.uint64], choice: npt.NDArray[np.uint64], position: Int64Array
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row, a pure function of the three counters.

    Three rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014), each absorbing one counter.
    """
    state = _mix(seed + _GAMMA)
    state = _mix((state ^ choice) + _GAMMA)
    state = _mix((state ^ position.astype(np.uint64)) + _GAMMA)
    numbers: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mask(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Rule out the stop tokens of rows that have not reached their min_tokens."""
    pairs = [(row, token) for row, tokens in enumerate(rows.masked_tokens) for token in tokens]
    if not pairs:
        return logits
    row, token = torch.tensor(pairs).unbind(dim=1)
    return logits.index_put((row, token), torch.tensor(-torch.inf))


def _truncate(
    logits: torch.Tensor, top_k: Int64Array, top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Rule out what top-k, then top-p over the renormalised rest, cut off; the best token stays.

    Only rows that ask for it are sorted: the order of the rest would cost more than the draw.
    """
    vocab_size = logits.shape[-1]
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    if not len(cut):
        return logits
    index = torch.from_numpy(cut)
    limit = torch.from_numpy(np.where(top_k[cut] > 0, top_k[cut], vocab_size))
    values, order = logits[index].sort(dim=-1, descending=True, stable=True)
    values = values.masked_fill(torch.arange(vocab_size) >= limit[:, None], -torch.inf)
    probabilities = values.softmax(dim=-1).double()
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= torch.from_numpy(top_p[cut])[:, None]
    beyond[:, 0] = False
    kept = values.masked_fill(beyond, -torch.inf)
    logits = logits.clone()
    logits[index] = torch.empty_like(kept).scatter_(-1, order, kept)
    return logits


def _draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the distribution at `numbers`, in vocabulary order.

    That order does not change when rounding swaps two near-equal probabilities, as it may between
    batch sizes; sums are float64, so a long vocabulary costs no probability mass.
    """
    cumulated = logits.softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Strictly below the total: the token found always has a probability above zero.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros(())))
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1)

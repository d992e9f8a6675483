"""Chooses the next token of each row: greedy, or drawn after temperature, min-p, top-k, top-p.

A draw depends on (seed, choice, output position) alone: there is no generator state, so a request
draws the same alone, in a batch, after preemption and on another replica.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from worker.runner.adjust import adjust
from worker.runner.request_state import Int64Array
from worker.runner.row_scans import best_tokens
from worker.runner.sampling_state import SamplingRows

GREEDY_BELOW = 1e-5
"""Below this temperature a row is greedy (as in vLLM)."""

Sampler = Callable[[torch.Tensor, SamplingRows], Int64Array]
"""What chooses tokens as `sample` does; a device may have a faster way."""

_MOST_SEEN = 512
"""So many of a row's best tokens are ordered at first; nearly always no more of them stay."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def sample(logits: torch.Tensor, rows: SamplingRows) -> Int64Array:
    """Return one token id per row; logits [rows, vocab_size] float32, left unchanged.

    Every row has a finite logit; those that a grammar rules out are -inf.
    """
    logits = adjust(logits, rows)
    tokens = best_tokens(logits)
    drawn = np.flatnonzero(rows.temperature >= GREEDY_BELOW)
    if len(drawn):
        index = torch.from_numpy(drawn).to(logits.device)
        numbers = uniform(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])
        weights = tempered(logits[index], rows, drawn).softmax(dim=-1)
        chosen = draw(weights.double(), torch.from_numpy(numbers).to(logits.device))
        tokens[drawn] = chosen.cpu().numpy()
    return tokens


def tempered(logits: torch.Tensor, rows: SamplingRows, drawn: Int64Array) -> torch.Tensor:
    """Return the logits of the distribution that the rows `drawn` of `rows` draw from.

    `logits` [drawn, vocab_size] are adjusted (adjust.py) and belong to those rows, in order.
    """
    temperature = torch.from_numpy(rows.temperature[drawn]).to(logits.device)
    scaled = logits / temperature[:, None]
    min_p = rows.min_p[drawn]
    if min_p.any():
        # A log probability differs from the best one's as the logits do. Of 0 nothing is cut.
        with np.errstate(divide="ignore"):
            margin = torch.from_numpy(np.log(min_p)).to(logits.device)
        lowest = scaled.amax(dim=-1, keepdim=True) + margin[:, None]
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    return truncate(scaled, rows.top_k[drawn], rows.top_p[drawn])


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


def truncate(
    logits: torch.Tensor, top_k: Int64Array, top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Rule out what top-k, then top-p over the renormalised rest, cut off; the best token stays.

    Of equal tokens the first in the vocabulary stay. Only rows that ask for it are ordered, and of
    those only their best tokens: the order of the rest would cost more than all else.
    """
    vocab_size = logits.shape[-1]
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    if not len(cut):
        return logits
    limit = np.where(top_k[cut] > 0, np.minimum(top_k[cut], vocab_size), vocab_size)
    index = torch.from_numpy(cut).to(logits.device)
    limits = torch.from_numpy(limit).to(logits.device)
    shares = torch.from_numpy(np.where(top_p[cut] < 1.0, top_p[cut], np.inf)).to(logits.device)
    logits = logits.clone()
    kept, is_settled = _kept_of_best(logits[index], limits, shares)
    logits[index] = kept
    unsettled = ~is_settled
    if unsettled.any():
        index = index[unsettled]
        logits[index] = _kept_of_all(logits[index], limits[unsettled], shares[unsettled])
    return logits


def _kept_of_best(
    logits: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut rows by looking at their best tokens; also tell which rows that has settled.

    It has not where more tokens stay, or are to share the probability, than were looked at, nor
    where the last to stay has equals among those to go; such rows are returned as they are.
    Whether a row is settled depends on nothing beside it.
    """
    vocab_size = logits.shape[-1]
    seen = torch.where(limits <= _MOST_SEEN, limits, _MOST_SEEN).clamp(max=vocab_size - 1)
    values = logits.topk(int(seen.max()) + 1, dim=-1).values
    place = torch.arange(values.shape[-1], device=logits.device)
    within = values.masked_fill(place >= limits[:, None], -torch.inf)
    is_short = limits <= seen
    total = torch.where(is_short, within.logsumexp(dim=-1), logits.logsumexp(dim=-1))
    probabilities = (within - total[:, None]).exp().double()
    before = probabilities.cumsum(dim=-1) - probabilities
    stays = (before < shares[:, None]) & (place < limits[:, None])
    count = stays.sum(dim=-1).clamp(min=1)
    last = values.gather(-1, count[:, None] - 1)
    following = values.gather(-1, count[:, None].clamp(max=values.shape[-1] - 1))
    is_settled = (count <= seen) & (following < last).squeeze(-1)
    is_settled &= is_short | (limits == vocab_size)
    lowest = last.masked_fill(~is_settled[:, None], -torch.inf)
    return logits.masked_fill(logits < lowest, -torch.inf), is_settled


def _kept_of_all(logits: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Cut rows by ordering all of their tokens."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    values = values.masked_fill(place >= limits[:, None], -torch.inf)
    probabilities = values.softmax(dim=-1).double()
    beyond = probabilities.cumsum(dim=-1) - probabilities >= shares[:, None]
    beyond[:, 0] = False
    kept = values.masked_fill(beyond, -torch.inf)
    return torch.empty_like(kept).scatter_(-1, order, kept)


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert each row's distribution at `numbers` [rows] in [0, 1), in vocabulary order.

    That order does not change when rounding swaps two near-equal probabilities, as it may between
    batch sizes. weights [rows, vocab_size] need not add up to 1; they and `numbers` are float64,
    so a long vocabulary costs no probability mass.
    """
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Strictly below the total: the token found always has a probability above zero.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1)

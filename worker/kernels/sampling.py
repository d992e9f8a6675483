"""Chooses tokens on the device: the likeliest, or one drawn at a temperature.

The draw is that of worker.runner.sampler: the distribution is inverted in vocabulary order at a
number that depends on (seed, choice, output position) alone. Sums differ from the sampler's in
rounding only, so the token is another one only where the number lies within about 1e-7 of the
border between two. It knows neither truncation nor masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from worker.kernels.jit import ceil_div, check_contiguous, check_launchable, kernel, next_power_of_2

GREEDY_BELOW = tl.constexpr(1e-5)
"""As in worker.runner.sampler."""

_COLUMNS = 4096


class Draws(NamedTuple):
    """How each row is drawn: [rows] each; seed and choice are 64 bits without a sign."""

    temperature: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    choice: torch.Tensor  # int64
    position: torch.Tensor  # int64, outputs before this one


def sample_tokens(logits: torch.Tensor, draws: Draws, out: torch.Tensor) -> None:
    """Write one token id per row of logits to `out`.

    logits [rows, vocab_size], contiguous, of any precision, each row with a finite logit and none
    that is no number; those at -inf are never drawn. out [rows] int64. Of equal logits the first
    counts.
    """
    check_contiguous(logits, out)
    check_launchable(logits, out)
    rows, vocab_size = logits.shape
    num_parts = ceil_div(vocab_size, _COLUMNS)
    largest = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, num_parts, dtype=torch.int64, device=logits.device)
    total = torch.empty(rows, num_parts, dtype=torch.float64, device=logits.device)
    parts = (largest, where, total)
    _summarise[(rows, num_parts)](
        logits, draws.temperature, *parts, VOCAB=vocab_size, COLUMNS=_COLUMNS, num_warps=8
    )
    _choose[(rows,)](
        logits,
        *draws,
        *parts,
        out,
        VOCAB=vocab_size,
        COLUMNS=_COLUMNS,
        NUM_PARTS=num_parts,
        PARTS=next_power_of_2(num_parts),
        num_warps=8,
    )


@kernel()
def _weights(logits: tl.tensor, inside: tl.tensor, temperature: tl.tensor, largest: tl.tensor):  # type: ignore[no-untyped-def]
    """Return softmax weights relative to the `largest` logit, float64; 0 outside."""
    x = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
    weight = tl.exp(x / temperature - largest / temperature)
    return tl.where(inside, weight, 0.0).to(tl.float64)


@kernel()
def _summarise(
    logits: tl.tensor,
    temperatures: tl.tensor,
    largest: tl.tensor,
    where: tl.tensor,
    total: tl.tensor,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the largest logit of a part, its token, and the sum of its weights."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = token < VOCAB
    at = logits + row * VOCAB + token
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    best, best_at = tl.max(x, axis=0, return_indices=True)
    to = row * tl.num_programs(1) + part
    tl.store(largest + to, best)
    tl.store(where + to, (part * COLUMNS + best_at).to(tl.int64))
    temperature = tl.load(temperatures + row)
    if temperature >= GREEDY_BELOW:
        # Of a part without any possible token every weight is zero, whatever they relate to.
        reference = tl.where(best == float("-inf"), 0.0, best)
        tl.store(total + to, tl.sum(_weights(at, inside, temperature, reference), axis=0))


@kernel()
def _choose(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    largest: tl.tensor,
    where: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Find the part, then the token in it, where the cumulated weights pass the number drawn."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    exists = index < NUM_PARTS
    at = row * NUM_PARTS + index
    part_best = tl.load(largest + at, mask=exists, other=float("-inf"))
    part_token = tl.load(where + at, mask=exists, other=0)
    best = tl.max(part_best, axis=0)
    # Of equal logits the first: parts, and tokens within them, are in vocabulary order.
    token = tl.min(tl.where(exists & (part_best == best), part_token, VOCAB), axis=0)
    temperature = tl.load(temperatures + row)
    if temperature >= GREEDY_BELOW:
        sums = tl.load(total + at, mask=exists, other=0.0)
        rescale = tl.exp(part_best / temperature - best / temperature)
        sums = tl.where(exists, sums * rescale.to(tl.float64), 0.0)
        upto = tl.cumsum(sums, axis=0)
        number = _uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        target = number * tl.sum(sums, axis=0)
        part = _first_above(upto, sums, target, index)
        before = tl.sum(tl.where(index < part, sums, 0.0), axis=0)
        column = tl.arange(0, COLUMNS)
        inside = part * COLUMNS + column < VOCAB
        weights = _weights(
            logits + row * VOCAB + part * COLUMNS + column, inside, temperature, best
        )
        found = _first_above(tl.cumsum(weights, axis=0), weights, target - before, column)
        token = (part * COLUMNS + found).to(tl.int64)
    tl.store(out + row, token)


@kernel()
def _first_above(upto: tl.tensor, weights: tl.tensor, target: tl.tensor, index: tl.tensor):  # type: ignore[no-untyped-def]
    """Return the first index whose cumulated weight exceeds the target.

    Rounding may put the target at or above the last sum, or before the first weight that is not
    zero: what is returned always has a weight above zero.
    """
    last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)
    first = tl.min(tl.where((upto > target) & (weights > 0.0), index, last), axis=0)
    return tl.minimum(first, last)


@kernel()
def _uniform(seed: tl.tensor, choice: tl.tensor, position: tl.tensor):  # type: ignore[no-untyped-def]
    """Return worker.runner.sampler.uniform of one row, bit for bit."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ choice.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ position.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    return (state >> 11).to(tl.float64) * (2.0**-53)


@kernel()
def _mix(x: tl.tensor):  # type: ignore[no-untyped-def]
    """Return one round of the SplitMix64 finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)

"""Mamba-2 mixers on a flattened batch: a gate, a short convolution, a scan and a norm by groups.

What a layer remembers after a token lies in a block of the KV cache where other layers keep keys
and values: the last inputs of the convolution, and the state of the scan in float32. It knows block
tables, not requests; the recurrence itself is in mamba_scan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from worker.cpu.attention import AttentionPlan
from worker.model.mamba_config import MambaConfig
from worker.model.mamba_scan import ScanInputs, advance, scan
from worker.model.short_conv import StatePlan, convolve, state_plan

_STRETCH = 32
"""Tokens that are scanned at once: more of them cost squares, fewer cost calls."""

_ITEMS_AT_ONCE = 1 << 18
"""Numbers of states that advance together: as many as stay in a core's cache between two passes."""


@dataclass(slots=True, frozen=True)
class MambaWeights:
    """What a mixer has beside its two products; all but the convolution's is float32."""

    taps: torch.Tensor  # [kernel, channels], for the oldest input first
    conv_bias: torch.Tensor | None  # [channels]
    step_bias: torch.Tensor  # [heads]
    decay: torch.Tensor  # [heads] < 0
    skip: torch.Tensor  # [heads]
    norm: torch.Tensor  # [inner_size]


@dataclass(slots=True, frozen=True)
class Stretch:
    """Consecutive tokens of one request, scanned at once: rows [start, end) of the batch.

    `kept_block`: where the state behind them is kept, None if it is not.
    """

    start: int
    end: int
    kept_block: int | None


@dataclass(slots=True, frozen=True)
class Passage:
    """Several tokens of one request, stretch by stretch from the state in a block."""

    read_block: int
    stretches: Sequence[Stretch]


@dataclass(slots=True, frozen=True)
class MambaPlan:
    """Which states the tokens of a batch go on from, and which are kept.

    Requests with a single token advance together, from states in one block to those in another,
    which may be the same. All others are `passages`.
    """

    states: StatePlan
    single_rows: torch.Tensor  # [singles] int64
    single_reads: torch.Tensor  # [singles] int64
    single_keeps: torch.Tensor  # [singles] int64
    passages: Sequence[Passage]


def mamba_plan(plan: AttentionPlan, *, group: int, kernel: int) -> MambaPlan:
    """Lay out a state group; see state_plan for which states are read and kept.

    A request always has a block for the state behind its last token.
    """
    states = state_plan(plan, group=group, kernel=kernel)
    counts = plan.num_queries
    ends = np.cumsum(counts)
    starts = ends - counts
    reads = states.read_blocks.numpy()
    kept_of = dict(zip(states.kept_rows.tolist(), states.kept_blocks.tolist(), strict=True))
    (single,) = np.nonzero(counts == 1)
    rows = starts[single]
    return MambaPlan(
        states=states,
        single_rows=torch.from_numpy(rows),
        single_reads=torch.from_numpy(reads[single]),
        single_keeps=torch.tensor([kept_of[row] for row in rows.tolist()], dtype=torch.int64),
        passages=[
            Passage(int(reads[i]), _stretches(int(starts[i]), int(ends[i]), kept_of))
            for i in np.flatnonzero(counts > 1)
        ],
    )


def _stretches(start: int, end: int, kept_of: dict[int, int]) -> list[Stretch]:
    """Cut the rows of a request behind every state that is kept, and where they get long."""
    assert end - 1 in kept_of, "the state behind the last token has no block"
    stretches = []
    first = start
    for row in range(start, end):
        kept_block = kept_of.get(row)
        if kept_block is not None or row + 1 - first == _STRETCH:
            stretches.append(Stretch(first, row + 1, kept_block))
            first = row + 1
    return stretches


class StateMemory:
    """The states of one layer in the rows that its blocks have for keys and values.

    Inputs of the convolution come first, in the precision of the cache; the state of the scan
    follows, as float32, and goes on among the values.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, config: MambaConfig) -> None:
        self.num_items = config.num_state_items
        conv_words = config.conv_bytes(keys.itemsize) // torch.float32.itemsize
        self._shape = (config.num_heads, config.head_dim, config.state_size)
        self.inputs = keys.flatten(1)
        first = self.inputs.view(torch.float32)[:, conv_words:]
        rest = values.flatten(1).view(torch.float32)
        self._first = first[:, : self.num_items]
        self._rest = rest[:, : self.num_items - self._first.shape[1]]

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies of states, [blocks, heads, head_dim, state_size]."""
        parts = [part.index_select(0, blocks) for part in (self._first, self._rest)]
        return torch.cat(parts, dim=1).view(-1, *self._shape)

    def write(self, blocks: torch.Tensor, states: torch.Tensor) -> None:
        """Keep states of the same shape, one in each of `blocks`."""
        flat = states.flatten(1)
        num_first = self._first.shape[1]
        self._first.index_copy_(0, blocks, flat[:, :num_first])
        self._rest.index_copy_(0, blocks, flat[:, num_first:])


def mix(
    projected: torch.Tensor,
    weights: MambaWeights,
    config: MambaConfig,
    *,
    memory: StateMemory,
    plan: MambaPlan,
    eps: float,
) -> torch.Tensor:
    """Return what goes into the last product, [tokens, inner_size]; keep states.

    projected [tokens, projected_size]: gate, the convolution's input, steps.
    """
    by_use = [config.inner_size, config.num_channels, config.num_heads]
    gate, inputs, steps = torch.split(projected, by_use, dim=-1)
    mixed = F.silu(convolve(inputs, weights.taps, memory.inputs, plan.states, weights.conv_bias))
    by_vectors = [config.inner_size, *[config.num_groups * config.state_size] * 2]
    values, writes, reads = torch.split(mixed.float(), by_vectors, dim=-1)
    scanned = _scan_batch(
        ScanInputs(
            values=values.view(-1, config.num_heads, config.head_dim),
            steps=F.softplus(steps.float() + weights.step_bias),
            writes=writes.view(-1, config.num_groups, config.state_size),
            reads=reads.view(-1, config.num_groups, config.state_size),
        ),
        weights,
        memory,
        plan,
    )
    gated = (scanned * F.silu(gate.float())).view(len(scanned), config.num_groups, -1)
    normed = F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(1)
    return (normed * weights.norm).to(projected.dtype)


def _scan_batch(
    inputs: ScanInputs, weights: MambaWeights, memory: StateMemory, plan: MambaPlan
) -> torch.Tensor:
    """Run the recurrence over a batch; return [tokens, inner_size], the skip included."""
    outputs = inputs.values * weights.skip[:, None]
    num_at_once = max(1, _ITEMS_AT_ONCE // memory.num_items)
    for first in range(0, len(plan.single_rows), num_at_once):
        some = slice(first, first + num_at_once)
        rows, states = plan.single_rows[some], memory.read(plan.single_reads[some])
        outputs[rows] += advance(inputs.rows(rows), weights.decay, states)
        memory.write(plan.single_keeps[some], states)
    for passage in plan.passages:
        (state,) = memory.read(torch.tensor([passage.read_block]))
        for stretch in passage.stretches:
            part = inputs.part(stretch.start, stretch.end)
            outputs[stretch.start : stretch.end] += scan(part, weights.decay, state)
            if stretch.kept_block is not None:
                memory.write(torch.tensor([stretch.kept_block]), state[None])
    return outputs.flatten(1)

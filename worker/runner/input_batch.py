"""Turns the scheduled tokens of a step into one flattened batch.

Prefill chunks and decode rows lie one after the other in the scheduler's order. It reads the
request table and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.cpu.attention import AttentionPlan, DecodeGroup, chunk_of, decode_groups
from worker.runner.request_state import Int64Array, RequestTable


@dataclass(slots=True, frozen=True)
class InputBatch:
    """What the model computes in a step; requests in batch order."""

    slots: Int64Array  # [requests]
    num_scheduled: Int64Array  # [requests]
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    plan: AttentionPlan
    sampling: Int64Array  # [sampled] indices of requests whose last known token is computed
    logits_rows: torch.Tensor  # [sampled] int64, row of that last token


def build_input_batch(
    table: RequestTable, slots: Int64Array, num_scheduled: Int64Array, *, block_size: int
) -> InputBatch:
    """Lay out the next `num_scheduled` tokens of the requests in `slots`."""
    ends = np.cumsum(num_scheduled)
    starts = ends - num_scheduled
    num_computed = table.num_computed[slots]
    token_slots = np.repeat(slots, num_scheduled)
    offsets = np.arange(ends[-1]) - np.repeat(starts, num_scheduled)
    positions = np.repeat(num_computed, num_scheduled) + offsets
    blocks = table.block_ids[token_slots, positions // block_size].astype(np.int64)
    sampling = np.flatnonzero(num_computed + num_scheduled == table.num_tokens[slots])
    return InputBatch(
        slots=slots,
        num_scheduled=num_scheduled,
        token_ids=torch.from_numpy(table.token_ids[token_slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        plan=AttentionPlan(
            slots=torch.from_numpy(blocks * block_size + positions % block_size),
            chunks=[
                chunk_of(
                    start=int(starts[i]),
                    end=int(ends[i]),
                    num_computed=int(num_computed[i]),
                    block_ids=table.block_ids[slots[i]],
                    block_size=block_size,
                )
                for i in np.flatnonzero(num_scheduled > 1)
            ],
            groups=_decode_groups(table, slots, num_scheduled, starts, block_size),
        ),
        sampling=sampling,
        logits_rows=torch.from_numpy(ends[sampling] - 1),
    )


def _decode_groups(
    table: RequestTable,
    slots: Int64Array,
    num_scheduled: Int64Array,
    starts: Int64Array,
    block_size: int,
) -> list[DecodeGroup]:
    """Plan the requests with one token, whether decoding or at the tail of a prompt."""
    single = np.flatnonzero(num_scheduled == 1)
    return decode_groups(
        rows=starts[single],
        num_context=table.num_computed[slots[single]] + 1,
        block_tables=table.block_ids[slots[single]],
        block_size=block_size,
    )

"""Turns the scheduled tokens of a step into one flattened batch.

Prefill chunks and decode rows lie one after the other in the scheduler's order. It reads the
request table and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.cpu.attention import AttentionPlan
from worker.runner.request_state import Int64Array, RequestTable


@dataclass(slots=True, frozen=True)
class InputBatch:
    """What the model computes in a step; requests in batch order."""

    slots: Int64Array  # [requests]
    num_scheduled: Int64Array  # [requests], drafts included
    num_drafts: Int64Array  # [requests]
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    plan: AttentionPlan
    sampling: Int64Array  # [sampled] indices of requests whose last known token is computed
    logits_rows: torch.Tensor  # [logits] int64, for each: that last token, and its drafts
    first_logits: Int64Array  # [sampled] where the rows of each begin among those


def build_input_batch(
    table: RequestTable,
    slots: Int64Array,
    num_scheduled: Int64Array,
    num_drafts: Int64Array,
    *,
    block_size: int,
) -> InputBatch:
    """Lay out the next `num_scheduled` tokens of the requests in `slots`.

    The last `num_drafts` of them stand in the table behind the known tokens.
    """
    ends = num_scheduled.cumsum()
    num_computed = table.num_computed[slots]
    token_slots, positions = slots, num_computed
    if ends[-1] > len(slots):
        token_slots = np.repeat(slots, num_scheduled)
        offsets = np.arange(ends[-1]) - np.repeat(ends - num_scheduled, num_scheduled)
        positions = np.repeat(num_computed, num_scheduled) + offsets
    num_blocks = -(-int(positions.max() + 1) // block_size)
    tables = [group[slots, :num_blocks] for group in table.block_ids]
    is_sampled = num_computed + num_scheduled == table.num_tokens[slots] + num_drafts
    (sampling,) = is_sampled.nonzero()
    logits_rows, first_logits = ends[sampling] - 1, np.arange(len(sampling))
    if num_drafts.any():
        num_logits = 1 + num_drafts[sampling]
        first_logits = num_logits.cumsum() - num_logits
        first_rows = ends[sampling] - num_logits - first_logits
        logits_rows = np.repeat(first_rows, num_logits) + np.arange(num_logits.sum())
    return InputBatch(
        slots=slots,
        num_scheduled=num_scheduled,
        num_drafts=num_drafts,
        token_ids=torch.from_numpy(table.token_ids[token_slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        plan=AttentionPlan(
            num_queries=num_scheduled,
            num_computed=num_computed,
            block_tables=tables[0],
            block_size=block_size,
            more_tables=tuple(tables[1:]),
        ),
        sampling=sampling,
        logits_rows=torch.from_numpy(logits_rows),
        first_logits=first_logits,
    )

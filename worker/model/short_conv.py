"""Gated short convolutions (LFM2): layers that remember their last few inputs and nothing else.

That memory, the state after a token, lies in a block of the KV cache where other layers keep keys.
It knows block tables, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.cpu.attention import AttentionPlan

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class StatePlan:
    """Which inputs each token of a flattened batch reads, and which states are kept.

    Inputs are numbered: those in the requests' states first, oldest first, then the batch's own.
    """

    read_blocks: torch.Tensor  # [requests] int64, the null block for one that begins
    inputs: torch.Tensor  # [tokens, kernel] int64, oldest first
    kept_rows: torch.Tensor  # [states] int64, rows of the batch behind which they are
    kept_blocks: torch.Tensor  # [states] int64
    kept_inputs: torch.Tensor  # [states, kernel - 1] int64


def state_plan(plan: AttentionPlan, *, group: int, kernel: int) -> StatePlan:
    """Lay out a state group: states are read from the block of the last computed token.

    They are written to every block that the table names and the batch reaches, at the block's end
    or at the request's.
    """
    size, depth = plan.block_size, kernel - 1
    table, computed, counts = plan.tables(group), plan.num_computed, plan.num_queries
    num_requests = len(counts)
    starts = np.cumsum(counts) - counts
    request = np.repeat(np.arange(num_requests), counts)
    nth = np.arange(len(request)) - starts[request]

    def inputs_at(rows: Int64Array, offsets: Int64Array) -> torch.Tensor:
        """Number the inputs of requests at `offsets` from the first token of the batch."""
        remembered = rows * depth + depth + offsets
        own = num_requests * depth + starts[rows] + offsets
        return torch.from_numpy(np.where(offsets < 0, remembered, own))

    last = table[np.arange(num_requests), np.maximum(computed - 1, 0) // size]
    read_blocks = np.where(computed > 0, last, 0).astype(np.int64)
    assert read_blocks[computed > 0].all(), "a state is read from the null block"
    position = computed[request] + nth
    block = table[request, position // size].astype(np.int64)
    is_kept = (nth == counts[request] - 1) | ((position + 1) % size == 0)
    (kept,) = np.nonzero(is_kept & (block != 0))
    return StatePlan(
        read_blocks=torch.from_numpy(read_blocks),
        inputs=inputs_at(request[:, None], nth[:, None] + np.arange(-depth, 1)),
        kept_rows=torch.from_numpy(kept),
        kept_blocks=torch.from_numpy(block[kept]),
        kept_inputs=inputs_at(request[kept, None], nth[kept, None] + np.arange(1 - depth, 1)),
    )


def convolve(
    new: torch.Tensor,
    taps: torch.Tensor,
    memory: torch.Tensor,
    plan: StatePlan,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution of `new` [tokens, channels] with what came before it; keep states.

    taps [kernel, channels], for the oldest input first; memory [blocks, elements] of one layer,
    whose rows begin with a state of kernel - 1 inputs. The sum is float32, `bias` [channels] in it.
    """
    depth, channels = len(taps) - 1, new.shape[1]
    states = memory[:, : depth * channels].view(len(memory), depth, channels)
    inputs = torch.cat((states[plan.read_blocks].flatten(0, 1), new))
    states[plan.kept_blocks] = inputs[plan.kept_inputs]
    mixed = (inputs[plan.inputs].float() * taps.float()).sum(dim=1)
    return (mixed if bias is None else mixed + bias.float()).to(new.dtype)

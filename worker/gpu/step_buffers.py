"""The inputs of a step on the device: buffers that stay where they are, filled by one copy.

Everything is int32 in one pinned piece of host memory and its twin on the device; what a step does
not use of the block tables is not copied. It knows tokens and blocks by number only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from worker.cpu.attention import AttentionPlan
from worker.gpu.dispatcher import Dispatch

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class StepInputs:
    """Views of the device's buffers at the padded sizes of a step; all int32.

    Padding tokens have slot 0, in the null block, and padding requests no context.
    `tokens_per_request` None: the requests have unequal numbers of tokens.
    """

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]
    query_start: torch.Tensor  # [requests + 1]
    context_lens: torch.Tensor  # [requests]
    block_tables: torch.Tensor  # [requests, blocks]
    tokens_per_request: int | None

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, padding included."""
        return len(self.token_ids)


class StepBuffers:
    """Room for `max_tokens` tokens of `max_num_seqs` requests with `max_blocks` blocks each."""

    def __init__(
        self, *, max_tokens: int, max_num_seqs: int, max_blocks: int, device: torch.device
    ) -> None:
        self._max_blocks = max_blocks
        sizes = [max_tokens] * 4 + [max_num_seqs + 1, max_num_seqs, max_num_seqs * max_blocks]
        # Multiples of 4 elements, so that every buffer is aligned to 16 bytes.
        self._ends = list(accumulate(-(-size // 4) * 4 for size in sizes))
        is_cuda = device.type == "cuda"
        self._staged = torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def fill(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        rows: torch.Tensor,
        *,
        dispatch: Dispatch,
    ) -> None:
        """Take in a batch of [tokens] int64 on the CPU, pad it as dispatched, and copy it.

        rows [rows] int64 are those whose logits are wanted; they are not padded. The copy is
        asynchronous; the next `fill` waits for it.
        """
        self._wait_for_copy()
        wanted, ids, places, slots, starts, contexts, tables = self._views(self._staged.numpy())
        wanted[: len(rows)] = rows.numpy()
        num_tokens, num_requests = len(token_ids), len(plan.num_queries)
        position = positions.numpy()
        ids[:num_tokens] = token_ids.numpy()
        places[:num_tokens] = position
        slots[:num_tokens] = plan.slots(position)
        for buffer in (ids, places, slots):
            buffer[num_tokens : dispatch.num_tokens] = 0
        starts[0] = 0
        np.cumsum(plan.num_queries, out=starts[1 : num_requests + 1])
        starts[num_requests + 1 : dispatch.num_requests + 1] = num_tokens
        contexts[:num_requests] = plan.num_computed + plan.num_queries
        contexts[num_requests : dispatch.num_requests] = 0
        tables[:num_requests, : plan.block_tables.shape[1]] = plan.block_tables
        self._copy(num_requests)

    def fill_padding(self, dispatch: Dispatch) -> None:
        """Make every row padding: a step that computes all and writes nothing."""
        self._wait_for_copy()
        *rows, _ = self._views(self._staged.numpy())
        for buffer in rows:
            buffer[: max(dispatch.num_tokens, dispatch.num_requests + 1)] = 0
        self._copy(0)

    def rows(self, count: int) -> torch.Tensor:
        """Return the rows whose logits are wanted, [count] int32 on the device."""
        return self._device[:count]

    def inputs(self, dispatch: Dispatch, *, tokens_per_request: int | None) -> StepInputs:
        """Return the views that a step of these sizes reads."""
        _, token_ids, positions, slots, starts, contexts, tables = (
            self._device[start:end]
            for start, end in zip([0, *self._ends], self._ends, strict=False)
        )
        num_requests = dispatch.num_requests
        return StepInputs(
            token_ids=token_ids[: dispatch.num_tokens],
            positions=positions[: dispatch.num_tokens],
            slots=slots[: dispatch.num_tokens],
            query_start=starts[: num_requests + 1],
            context_lens=contexts[:num_requests],
            block_tables=tables[: num_requests * self._max_blocks].view(num_requests, -1),
            tokens_per_request=tokens_per_request,
        )

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _views(self, whole: Int32Array) -> list[Int32Array]:
        views = [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]
        tables = views[-1]
        rows = len(tables) // self._max_blocks
        views[-1] = tables[: rows * self._max_blocks].reshape(rows, self._max_blocks)
        return views

    def _copy(self, num_requests: int) -> None:
        end = self._ends[-2] + num_requests * self._max_blocks
        self._device[:end].copy_(self._staged[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

"""Which rows of a step predict prompt tokens whose log probabilities somebody asked for.

Rows are places in the flattened batch of tokens; their logits are the model's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from engine.frontend.logprobs import TokenLogprobs
from worker.runner.logprobs import logprobs_of
from worker.runner.request_state import Int64Array, RequestTable


@dataclass(slots=True, frozen=True)
class PromptRows:
    """Rows to have logits of, in order; `spans` says how many belong to which request."""

    rows: torch.Tensor  # [rows] int64
    tokens: list[int]  # the prompt token that each row predicts
    num_top: list[int]
    spans: list[tuple[int, int]]  # (index of the request in the batch, number of its rows)

    def logprobs(
        self, logits: torch.Tensor, request_ids: Sequence[str]
    ) -> dict[str, list[TokenLogprobs]]:
        """Return what each request asked for, given the logits of `rows` and the batch's ids."""
        entries = iter(logprobs_of(logits, self.tokens, self.num_top))
        return {request_ids[i]: list(islice(entries, count)) for i, count in self.spans}


def prompt_rows(
    table: RequestTable,
    slots: Int64Array,
    num_scheduled: Int64Array,
    num_top: Sequence[int | None],
) -> PromptRows | None:
    """Find the rows that predict prompt tokens; None when nobody asks, or all are computed.

    `slots` and `num_scheduled` [requests] are the batch, before progress is noted; `num_top` is
    how many alternatives each request wants, None where it wants no log probabilities.
    """
    starts = np.cumsum(num_scheduled) - num_scheduled
    rows: list[Int64Array] = []
    tokens: list[int] = []
    tops: list[int] = []
    spans: list[tuple[int, int]] = []
    for i, wanted in enumerate(num_top):
        if wanted is None:
            continue
        computed = int(table.num_computed[slots[i]])
        last = int(table.num_prompt_tokens[slots[i]]) - 1
        count = min(computed + int(num_scheduled[i]), last) - computed
        if count <= 0:
            continue
        rows.append(np.arange(starts[i], starts[i] + count))
        tokens += table.token_ids[slots[i], computed + 1 : computed + 1 + count].tolist()
        tops += [wanted] * count
        spans.append((i, count))
    return PromptRows(torch.from_numpy(np.concatenate(rows)), tokens, tops, spans) if rows else None

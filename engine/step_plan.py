"""A step while the scheduler plans it: the token budget, and what the runner must be told.

It decides no order and touches no blocks (scheduler.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.output import NewRequestData, SchedulerOutput
from engine.request import Request


class StepPlan:
    """Collects what a step computes: at most `budget` tokens, `share` of them for one prompt.

    `requests`: those that compute something, in batch order.
    """

    __slots__ = (
        "_max_chunk",
        "budget",
        "draft_token_ids",
        "held_back",
        "new_block_ids",
        "new_requests",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "requests",
    )

    def __init__(self, *, budget: int, share: float) -> None:
        self.budget = budget
        self._max_chunk = max(1, math.ceil(budget * share))
        self.held_back: list[Request] = []
        self.new_requests: list[NewRequestData] = []
        self.new_block_ids: dict[str, list[list[int]]] = {}
        self.num_scheduled_tokens: dict[str, int] = {}
        self.num_computed_tokens: dict[str, int] = {}
        self.requests: list[Request] = []
        self.draft_token_ids: dict[str, list[int]] = {}

    def chunk_of(self, request: Request) -> int:
        """Return how many of a request's tokens may be planned at first."""
        wanted = min(request.num_left, self.budget)
        if wanted <= self._max_chunk:
            return wanted
        self.held_back.append(request)
        return self._max_chunk

    def add_tokens(self, request: Request, num_new: int) -> None:
        """Let a request compute its next `num_new` tokens, within the budget."""
        request_id = request.request_id
        planned = self.num_scheduled_tokens.get(request_id)
        if planned is None:
            self.requests.append(request)
            self.num_computed_tokens[request_id] = request.num_computed_tokens
            planned = 0
        self.num_scheduled_tokens[request_id] = planned + num_new
        self.budget -= num_new

    def add_drafts(self, request: Request) -> None:
        """Let a request that reaches its last known token verify its drafts as well."""
        self.draft_token_ids[request.request_id] = list(request.draft_token_ids)
        self.add_tokens(request, len(request.draft_token_ids))

    def add_blocks(self, request: Request, new_ids: list[list[int]]) -> None:
        """Tell the runner the blocks that a running request was given, per cache group."""
        known = self.new_block_ids.setdefault(request.request_id, new_ids)
        if known is not new_ids:
            for ids, more in zip(known, new_ids, strict=True):
                ids.extend(more)

    def add_new(self, request: Request, block_ids: list[list[int]]) -> None:
        """Tell the runner everything about a request that enters the batch."""
        source = request.source
        self.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                sampling=source.sampling,
                eos_token_ids=source.eos_token_ids,
                choice=source.choice,
                lora=source.lora,
            )
        )


class InFlightStep(NamedTuple):
    """A step that was scheduled, and the requests that it computes, as they were then.

    NOTE: requests, not ids: an id may live again before a step of its first life returns.
    """

    scheduled: SchedulerOutput
    requests: list[Request]

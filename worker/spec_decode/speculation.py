"""What a runner adds to its steps so that tokens are guessed: when, how many, and at what cost.

It carries a proposer and the account of what its guesses brought. Verifying them is the runner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.spec_decode.payoff import Payoff
from engine.spec_decode.proposer import DraftContext, Proposer
from worker.runner.input_batch import InputBatch
from worker.runner.request_state import RequestTable
from worker.spec_decode.draft_model import DraftModelProposer
from worker.spec_decode.features import FeatureReader, HiddenTap


class Speculation:
    """Guesses for the running requests of one runner, at most `num_draft_tokens` for each.

    With `adaptive`, as many as pay by the clock; without, always all. `tap` brings the hidden
    states that a proposer reads, if it does.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        num_draft_tokens: int,
        adaptive: bool,
        tap: HiddenTap | None = None,
    ) -> None:
        self._proposer = proposer
        self._tap = tap
        self._num_draft_tokens = num_draft_tokens
        self._payoff = Payoff(max_drafts=num_draft_tokens) if adaptive else None
        self._sources: dict[str, NewRequestData] = {}

    def enter(self, request: NewRequestData) -> None:
        """Take in a request that begins or comes back."""
        self._sources[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._sources.pop(request_id, None)
        self._proposer.forget(request_id)
        if self._payoff is not None:
            self._payoff.forget(request_id)

    def clear(self) -> None:
        """Forget every request."""
        for request_id in list(self._sources):
            self.drop(request_id)

    def observe(self, step: SchedulerOutput, output: ModelRunnerOutput, step_s: float) -> None:
        """Learn from a step that took `step_s` seconds: its cost, and which guesses were right."""
        if self._payoff is None:
            return
        sampled = output.sampled_token_ids
        if not step.num_prefill_tokens and len(sampled) == len(step.num_scheduled_tokens):
            self._payoff.costs.observe(step.total_scheduled_tokens, step_s)
        for request_id, drafts in step.draft_token_ids.items():
            if request_id in sampled:
                self._payoff.observe(
                    request_id,
                    num_drafted=len(drafts),
                    num_accepted=len(sampled[request_id]) - 1,
                )

    def see(self, request_ids: Sequence[str], batch: InputBatch, table: RequestTable) -> None:
        """Show the proposer the hidden states of confirmed tokens, once drafts are verified."""
        if self._tap is None or not isinstance(self._proposer, FeatureReader):
            return
        hidden = self._tap.take()
        starts = np.cumsum(batch.num_scheduled) - batch.num_scheduled
        for request_id, slot, start, position in zip(
            request_ids, batch.slots, starts, batch.plan.num_computed, strict=True
        ):
            end = int(min(table.num_computed[slot], table.num_tokens[slot] - 1))
            if end > position:
                self._proposer.see(
                    request_id,
                    hidden[start : start + end - position],
                    position=int(position),
                    next_tokens=table.token_ids[slot, position + 1 : end + 1].astype(np.int64),
                )

    def distribution(self, request_id: str) -> torch.Tensor | None:
        """Return what a request's guesses were drawn from, [guesses, vocab_size].

        None when they are verified by equality with the request's own draws.
        """
        if isinstance(self._proposer, DraftModelProposer):
            return self._proposer.distribution(request_id)
        return None

    def propose(self, request_ids: Iterable[str], table: RequestTable) -> dict[str, list[int]]:
        """Return guesses for requests that have just sampled, by request id."""
        ids = list(request_ids)
        contexts = []
        num_rows = len(ids)
        for request_id in ids:
            context = self._context(request_id, table, num_requests=len(ids), num_rows=num_rows)
            if context is not None:
                contexts.append(context)
                num_rows += context.max_drafts
        return self._proposer.propose(contexts) if contexts else {}

    def _context(
        self, request_id: str, table: RequestTable, *, num_requests: int, num_rows: int
    ) -> DraftContext | None:
        """Describe a request to the proposer; None when it should have no guess now."""
        source = self._sources[request_id]
        slot = table.slot(request_id)
        num_tokens, num_prompt = int(table.num_tokens[slot]), int(table.num_prompt_tokens[slot])
        room = table.max_model_len - num_tokens - 1
        if source.sampling.max_tokens is not None:
            room = min(room, num_prompt + source.sampling.max_tokens - num_tokens - 1)
        limit = min(self._num_draft_tokens, room)
        if self._payoff is not None and limit > 0:
            asked = self._payoff.limit(request_id, num_requests=num_requests, num_rows=num_rows)
            limit = min(limit, asked)
        if limit <= 0:
            return None
        return DraftContext(
            request_id=request_id,
            token_ids=table.token_ids[slot, :num_tokens].data,
            num_prompt_tokens=num_prompt,
            sampling=source.sampling,
            choice=source.choice,
            max_drafts=limit,
        )

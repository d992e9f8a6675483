"""What a runner knows after a number of steps: the fold of steps and samples, and nothing else.

The reference for every runner's own tables, and what tells two of them apart. It computes nothing
and holds no KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class RunningRequest:
    """A request in the batch: known tokens, block ids per cache group, and its progress."""

    source: NewRequestData
    token_ids: list[int]
    block_ids: list[list[int]]
    num_prompt_tokens: int
    num_computed_tokens: int


class RunnerState:
    """The running requests by id. Steps and their outputs are folded in turn, or steps ahead."""

    def __init__(self) -> None:
        self.requests: dict[str, RunningRequest] = {}

    def take_step(self, step: SchedulerOutput) -> None:
        """Fold a step: forget, drop, add, extend, advance.

        ValueError, naming the request, when it contradicts what came before it.
        """
        if step.resync:
            self.requests.clear()
        for request_id in step.dropped_request_ids:
            self.requests.pop(request_id, None)
        for new in step.new_requests:
            if new.request_id in self.requests:
                raise ValueError(f"step {step.step}: {new.request_id} is new but runs already")
            self.requests[new.request_id] = RunningRequest(
                new,
                list(new.token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_prompt_tokens,
                new.num_computed_tokens,
            )
        for request_id, new_ids in step.new_block_ids.items():
            for known, more in zip(self._known(step, request_id).block_ids, new_ids, strict=True):
                known.extend(more)
        for request_id, token_ids in step.new_prompt_ids.items():
            request = self._known(step, request_id)
            request.token_ids.extend(token_ids)
            request.num_prompt_tokens += len(token_ids)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self._known(step, request_id)
            expected = step.num_computed_tokens[request_id]
            if request.num_computed_tokens != expected:
                raise ValueError(
                    f"step {step.step}: {request_id} has {request.num_computed_tokens} tokens "
                    f"computed, the step says {expected}"
                )
            num_drafts = len(step.draft_token_ids.get(request_id, ()))
            request.num_computed_tokens += num_tokens - num_drafts

    def take_output(self, output: ModelRunnerOutput) -> None:
        """Append what a step sampled; requests that are gone meanwhile are left out.

        All of several tokens but the last were drafts, and are computed.
        """
        for request_id, token_ids in output.sampled_token_ids.items():
            request = self.requests.get(request_id)
            if request is not None:
                request.token_ids.extend(token_ids)
                request.num_computed_tokens += len(token_ids) - 1

    def digest(self) -> bytes:
        """Return a digest of the whole state; O(all tokens), so for tests and idle moments."""
        return digest_of(
            (request_id, r.token_ids, r.block_ids, r.num_computed_tokens)
            for request_id, r in self.requests.items()
        )

    def _known(self, step: SchedulerOutput, request_id: str) -> RunningRequest:
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"step {step.step}: {request_id} does not run")
        return request


RequestState = tuple[str, list[int], list[list[int]], int]
"""A request in a full-state digest: id, known tokens, block ids per group, computed tokens."""


def digest_of(requests: Iterable[RequestState]) -> bytes:
    """Return the digest of a state given as plain values, in any order."""
    return hashlib.sha256(msgspec.msgpack.encode(sorted(requests))).digest()

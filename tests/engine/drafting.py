"""A proposer for tests: it knows what a request will say, and spoils that in stated places."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from engine.messages import EngineRequest
from engine.spec_decode.proposer import DraftContext

Guesses = Literal["none", "right", "wrong", "partly"]
"""`partly`: now all, now the first few are right, now there are none; by request and place."""


class Oracle:
    """Proposer over the tokens that `alone` finds for a request by itself, end tokens ignored."""

    def __init__(self, alone: Callable[[EngineRequest], list[int]], guesses: Guesses) -> None:
        self._alone = alone
        self._guesses = guesses
        self._expected: dict[str, list[int]] = {}

    def expect(self, *requests: EngineRequest) -> None:
        """Find out what requests will say, and what they would say behind their end."""
        if self._guesses == "none":
            return
        for request in requests:
            sampling = msgspec.structs.replace(
                request.sampling, max_tokens=(request.sampling.max_tokens or 0) + 8
            )
            endless = msgspec.structs.replace(request, eos_token_ids=(), sampling=sampling)
            self._expected[request.request_id] = self._alone(endless)

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        drafts_of = {c.request_id: self._guess(c) for c in contexts if self._guesses != "none"}
        return {request_id: drafts for request_id, drafts in drafts_of.items() if drafts}

    def forget(self, request_id: str) -> None:
        """What a request will say does not change."""

    def _guess(self, context: DraftContext) -> list[int]:
        place = len(context.token_ids) - context.num_prompt_tokens
        right = self._expected.get(context.request_id, [])[place:][: context.max_drafts]
        num_right = len(right)
        if self._guesses == "wrong":
            num_right = 0
        if self._guesses == "partly":
            dice = zlib.crc32(f"{context.request_id}/{place}".encode())
            if dice % 4 == 0:
                return []
            num_right = (dice >> 8) % (len(right) + 1)
        return right[:num_right] + [(token + 1) % 256 for token in right[num_right:]]

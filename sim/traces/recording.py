"""A trace being recorded: requests overlap, their rows must not be out of order.

It knows no HTTP. A request that is not over holds back the rows of those that came after it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sim.traces.keyed_blocks import KeyedBlocks, KeyedPrompt, Pseudonyms
from sim.traces.row import Outcome, TraceRow
from sim.traces.writer import TraceWriter

logger = logging.getLogger("prefixfleet.sim.record")


class RequestHints(msgspec.Struct, frozen=True):
    """What else of a request's body a trace keeps; names become pseudonyms."""

    model: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


@dataclass(slots=True)
class RecordedRequest:
    """One request from its arrival to its end; `prompts` stays empty while nobody read them."""

    arrival_s: float
    api_key: str | None
    request_id: str | None
    hints: RequestHints = field(default_factory=RequestHints)
    prompts: Sequence[KeyedPrompt] = ()
    num_output_tokens: int = 0
    outcome: Outcome | None = None


class Recording:
    """Writes the rows of requests in order of arrival, as soon as order allows."""

    def __init__(self, writer: TraceWriter, blocks: KeyedBlocks) -> None:
        self.blocks = blocks
        self._writer = writer
        self._requests: deque[RecordedRequest] = deque()
        self._tenants = Pseudonyms("key")
        self._sessions = Pseudonyms("session")
        self._salts = Pseudonyms("salt")

    @property
    def num_rows(self) -> int:
        """How many rows are in the file."""
        return self._writer.num_rows

    def begin(
        self, *, arrival_s: float, api_key: str | None, request_id: str | None
    ) -> RecordedRequest:
        """Note an arrival; calls come in order of time."""
        request = RecordedRequest(arrival_s, api_key, request_id)
        self._requests.append(request)
        return request

    def finish(self, request: RecordedRequest, outcome: Outcome) -> None:
        """Note a request's end, and write all rows that no open request precedes."""
        request.outcome = outcome
        while self._requests and self._requests[0].outcome is not None:
            for row in self._rows(self._requests.popleft()):
                self._writer.write(row)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file; who is still open has been cut off."""
        for request in list(self._requests):
            if request.outcome is None:
                self.finish(request, "cancelled")
        self._writer.close()

    def _rows(self, request: RecordedRequest) -> list[TraceRow]:
        """Return a row per prompt; a request without a readable prompt leaves none."""
        hints = request.hints
        tenant = self._tenants.of(request.api_key)
        session_id = self._sessions.of(hints.prompt_cache_key)
        salt = self._salts.of(hints.cache_salt)
        if not request.prompts:
            logger.warning("request=%s not recorded: no prompt was read", request.request_id)
        return [
            TraceRow(
                line=self.num_rows + 1,
                arrival_s=request.arrival_s,
                input_length=prompt.input_length,
                output_length=request.num_output_tokens // len(request.prompts),
                hash_ids=prompt.hash_ids,
                request_id=request.request_id,
                session_id=session_id,
                tenant=tenant,
                model=hints.model,
                client_salt=salt,
                outcome=request.outcome,
            )
            for prompt in request.prompts
        ]

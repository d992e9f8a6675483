"""Hands each request's outputs to the coroutine that waits for them.

Outputs that arrive before they are read are merged, so a slow reader costs its own tokens and
nothing else; who wants tokens by the dozen gets them so. It knows no transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from engine.frontend.errors import RequestError
from engine.messages import EngineOutput

OUTPUTS_PER_SLICE = 128
"""As in vLLM: a step of more requests is handed out in parts."""

_LONGEST_S = 1.0
"""After so long, what has come is handed out even if it is less than was asked for."""


class OutputRouter:
    """One slot per live request; everything happens on one event loop."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._dead_reason: str | None = None

    def open(self, request_id: str, *, interval: int = 1) -> None:
        """Reserve the slot of a request before it is sent; RequestError if the id is live.

        After the first, an output has at least `interval` tokens, or is the last, or comes a
        second after the one before.
        """
        if self._dead_reason is not None:
            raise RequestError("engine_dead", self._dead_reason)
        if request_id in self._slots:
            raise RequestError("invalid_request", f"request id {request_id} is in use")
        self._slots[request_id] = _Slot(interval)

    def close(self, request_id: str) -> bool:
        """Forget a request; True when its last output has been read (nothing is left to abort)."""
        slot = self._slots.pop(request_id, None)
        return slot is None or slot.finished

    def deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """Put outputs into their slots; those of forgotten requests are dropped."""
        for output in outputs:
            slot = self._slots.get(output.request_id)
            if slot is not None:
                slot.put(output)

    async def deliver_in_slices(self, outputs: Sequence[EngineOutput]) -> None:
        """Deliver the outputs of a large step so that others get their turn in between.

        Each slice wakes as many readers; all at once, their work would hold up everybody else.
        """
        for start in range(0, len(outputs), OUTPUTS_PER_SLICE):
            if start:
                await asyncio.sleep(0)
            self.deliver(outputs[start : start + OUTPUTS_PER_SLICE])

    def fail(self, reason: str) -> None:
        """End every request, now and later, with `engine_dead`."""
        self._dead_reason = reason
        for slot in self._slots.values():
            slot.fail(RequestError("engine_dead", reason))

    async def outputs(self, request_id: str) -> AsyncIterator[EngineOutput]:
        """Yield outputs up to the one with a finish reason; raise RequestError on a refusal."""
        slot = self._slots[request_id]
        while True:
            output = await slot.take()
            if output.finish_reason == "error" and output.error_kind is not None:
                raise RequestError(output.error_kind, output.error or "the engine failed")
            yield output
            if output.finish_reason is not None:
                return


def refusal(request_id: str, error: RequestError) -> EngineOutput:
    """Return the output that ends a request with an error."""
    return EngineOutput(
        request_id=request_id,
        finish_reason="error",
        error=error.message,
        error_kind=error.kind,
    )


class _Slot:
    """What has arrived for one request and was not read yet."""

    __slots__ = ("_error", "_interval", "_output", "_ready", "_wake_at", "finished")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._wake_at = 0.0
        self._output: EngineOutput | None = None
        self._error: RequestError | None = None
        self._ready = asyncio.Event()
        self.finished = False

    def put(self, output: EngineOutput) -> None:
        held = self._output
        if held is not None:
            output = msgspec.structs.replace(
                output,
                token_ids=held.token_ids + output.token_ids,
                num_cached_tokens=(
                    output.num_cached_tokens
                    if held.num_cached_tokens is None
                    else held.num_cached_tokens
                ),
                logprobs=held.logprobs + output.logprobs,
                prompt_logprobs=held.prompt_logprobs or output.prompt_logprobs,
            )
        self._output = output
        self.finished = output.finish_reason is not None
        if self._is_due(output):
            self._ready.set()

    def _is_due(self, output: EngineOutput) -> bool:
        if self._interval == 1 or self.finished or len(output.token_ids) >= self._interval:
            return True
        return time.monotonic() >= self._wake_at

    def fail(self, error: RequestError) -> None:
        self._error = error
        self.finished = True
        self._ready.set()

    async def take(self) -> EngineOutput:
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        assert output is not None
        if self._interval > 1 and output.token_ids:
            self._wake_at = time.monotonic() + _LONGEST_S
        return output

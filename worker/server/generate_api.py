"""POST /v1/chat/completions and /v1/completions: one path for both, streamed or whole.

A client that goes away cancels its handler, and leaving the runner aborts its choices in the
engine. Headers of a stream wait for the first token (or for the first keep-alive), so that an
engine's refusal still gets its status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.sse import DONE, KEEP_ALIVE, encode_error, encode_event
from worker.server.answers import Answer, answer_for
from worker.server.choices import ChoiceDelta, ChoiceRunner
from worker.server.front import ReplicaFront
from worker.server.generation import Choice, GenerateRequest, Generation, Preparer
from worker.server.http import REQUEST_ID, json_response, read_json_body
from worker.server.progress import ProgressLog

_log = logging.getLogger("prefixfleet.replica.generate")

FRONT = web.AppKey("front", ReplicaFront)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    return await _generate(request, parse_chat_request)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    return await _generate(request, parse_completion_request)


async def _generate(
    request: web.Request, parse: Callable[[bytes], GenerateRequest]
) -> web.StreamResponse:
    front = request.app[FRONT]
    started = time.monotonic()
    client = front.admit()
    preparer = Preparer(
        front.prompts, client.info, trusts_extension=front.spec.internal_token is not None
    )

    def prepare() -> Generation:
        parsed = parse(body)
        front.require_model(parsed.model)
        return preparer.prepare(parsed, request_id=request[REQUEST_ID])

    front.num_active += 1
    try:
        body = await read_json_body(request)
        generation = await front.pool.run(prepare)
        request[REQUEST_ID] = generation.request_id
        async with ChoiceRunner(client, generation.choices, dp_rank=generation.dp_rank) as runner:
            exchange = _Exchange(front, generation, runner, started)
            return await exchange.answer(request)
    finally:
        front.num_active -= 1


class _Exchange:
    """One generation while it is answered; counts what happens to it."""

    def __init__(
        self,
        front: ReplicaFront,
        generation: Generation,
        runner: ChoiceRunner,
        started: float,
    ) -> None:
        self._front = front
        self._generation = generation
        self._runner = runner
        self._started = started
        self._answer: Answer = answer_for(generation, created=int(front.clock.now()))
        self._progress = ProgressLog(generation.choices)
        resumed = {c.index for c in generation.choices if c.resumed is not None}
        self._has_token = bool(resumed)
        self._opened = resumed
        self._counted = {c.index for c in generation.choices if c.fold.finished}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer whole or as a stream; every choice is counted as finished exactly once."""
        try:
            if self._generation.request.stream:
                response = await self._stream(request)
            else:
                response = await self._whole()
        except asyncio.CancelledError:
            self._count_unfinished("abort")
            raise
        except Exception:
            self._count_unfinished("error")
            raise
        if self._runner.finished:
            self._front.metrics.observe_end(time.monotonic() - self._started)
        return response

    async def _whole(self) -> web.Response:
        while not self._runner.finished:
            await self._next(None)
        return json_response(self._answer.whole())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        news, death = await self._first_news()
        response = web.StreamResponse(headers=_SSE_HEADERS)
        await response.prepare(request)
        try:
            try:
                if death is not None:
                    raise death
                await self._relay(response, news)
            except RequestError as error:
                self._count_unfinished("error")
                await self._write(response, encode_error(error))
            await response.write_eof()
        except (ConnectionResetError, TimeoutError):
            _log.info("client is gone or does not read id=%s", self._generation.request_id)
            self._count_unfinished("abort")
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _first_news(self) -> tuple[ChoiceDelta | None, RequestError | None]:
        """Wait for the first token, or for the first keep-alive.

        A gateway is told of an engine that dies meanwhile by an error event, not by a status: so
        it can tell those whose request ran there from those who came too late.
        """
        if self._runner.finished:
            return None, None  # A resumed generation that lacks nothing but its end markers.
        try:
            return await self._next(self._front.spec.keep_alive_s), None
        except RequestError as error:
            if self._generation.reports_progress and error.kind == "engine_dead":
                return None, error
            raise

    async def _relay(self, response: web.StreamResponse, news: ChoiceDelta | None) -> None:
        """Write every delta, keep-alives in silence, then the end markers."""
        while True:
            await self._write(response, KEEP_ALIVE if news is None else self._events(news))
            if self._runner.finished:
                break
            news = await self._next(self._front.spec.keep_alive_s)
        wants_usage = self._generation.request.include_usage
        usage = encode_event(self._answer.usage_chunk()) if wants_usage else b""
        await self._write(response, usage + DONE)

    async def _next(self, timeout_s: float | None) -> ChoiceDelta | None:
        news = await self._runner.next(timeout_s)
        if news is None:
            return None
        if news.delta.token_ids and not self._has_token:
            self._has_token = True
            self._front.metrics.observe_first_token(time.monotonic() - self._started)
        if news.delta.finish_reason is not None:
            self._counted.add(news.choice.index)
            self._front.metrics.count_finished(news.delta.finish_reason)
        return news

    def _events(self, news: ChoiceDelta) -> bytes:
        """Encode a delta; one that shows nothing yet (half a character) has no event."""
        events = b""
        choice, delta = news.choice, news.delta
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            opening = self._answer.opening(choice)
            events += self._event(opening, choice) if opening is not None else b""
        self._progress.take(news)
        shows_ids = self._generation.request.return_token_ids and delta.token_ids
        if delta.text or delta.finish_reason is not None or shows_ids:
            events += self._event(self._answer.chunk(news), choice)
        return events

    def _event(self, chunk: msgspec.Struct, choice: Choice) -> bytes:
        if self._generation.reports_progress:
            progress = self._progress.report(choice)
            chunk = msgspec.structs.replace(chunk, prefixfleet=progress)
        return encode_event(chunk)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Write, waiting for a slow reader; one that reads nothing for too long is given up."""
        if data:
            async with asyncio.timeout(self._front.spec.write_timeout_s):
                await response.write(data)

    def _count_unfinished(self, reason: str) -> None:
        for choice in self._generation.choices:
            if choice.index not in self._counted:
                self._counted.add(choice.index)
                self._front.metrics.count_finished(reason)

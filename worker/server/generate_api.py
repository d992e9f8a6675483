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
from functools import partial

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.responses_answer import ResponseStream, whole_response
from engine.frontend.responses_request import (
    ResponsesRequest,
    as_responses_error,
    parse_responses_request,
)
from engine.frontend.sse import KEEP_ALIVE, EventShape, PlainEvents
from kvindex.foundation.tracing import server_span, span
from worker.server.answers import Answer, answer_for
from worker.server.choices import ChoiceDelta, ChoiceRunner
from worker.server.front import ReplicaFront
from worker.server.generation import Choice, GenerateRequest, Generation, Preparer
from worker.server.http import REQUEST_ID, json_bytes, read_json_body
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


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/responses: a chat completion, shown as a response."""
    try:
        return await _generate(request, parse_chat_request, parse_responses_request)
    except RequestError as error:
        raise as_responses_error(error) from None


async def _generate(
    request: web.Request,
    parse: Callable[[bytes], GenerateRequest],
    translate: Callable[[bytes], ResponsesRequest] | None = None,
) -> web.StreamResponse:
    """Serve a body; `translate` makes it one that `parse` takes, and the answer is shown so."""
    front = request.app[FRONT]
    started = time.monotonic()
    client = front.admit()
    preparer = Preparer(
        front.prompts,
        client.info,
        trusts_extension=front.spec.internal_token is not None,
        rules=front.rules,
    )

    def prepare() -> tuple[Generation, ResponsesRequest | None]:
        asked = translate(body) if translate is not None else None
        parsed = parse(body if asked is None else asked.chat)
        lora = front.require_model(parsed.model)
        return preparer.prepare(parsed, request_id=request[REQUEST_ID], lora=lora), asked

    front.num_active += 1
    try:
        with server_span("replica.request", request.headers):
            body = await read_json_body(request)
            generation, asked = await front.pool.run(prepare)
            request[REQUEST_ID] = generation.request_id
            choices, dp_rank = generation.choices, generation.dp_rank
            runner = ChoiceRunner(client, choices, dp_rank=dp_rank, interval=generation.interval)
            with span("engine.generate", request_id=generation.request_id, choices=len(choices)):
                async with runner:
                    exchange = _Exchange(front, generation, runner, started, asked)
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
        asked: ResponsesRequest | None,
    ) -> None:
        self._front = front
        self._asked = asked
        self._shape: EventShape = PlainEvents() if asked is None else ResponseStream(asked)
        self._generation = generation
        self._runner = runner
        self._started = started
        self._answer: Answer = answer_for(
            generation, encoder=front.prompts.encoder, created=int(front.clock.now())
        )
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
        body = await self._made(lambda: msgspec.json.encode(self._answer.whole()))
        return json_bytes(body if self._asked is None else whole_response(self._asked, body))

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
                await self._write(response, self._shape.fail(error))
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
            if news is None:
                events = KEEP_ALIVE
            elif news.choice.index in self._opened:
                events = self._events(news)
            else:
                events = await self._made(partial(self._events, news))
            await self._write(response, events)
            if self._runner.finished:
                break
            news = await self._next(self._front.spec.keep_alive_s)
        wants_usage = self._generation.request.include_usage
        usage = self._show(self._answer.usage_chunk()) if wants_usage else b""
        await self._write(response, usage + self._shape.end())

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

    async def _made(self, make: Callable[[], bytes]) -> bytes:
        """Make an answer, or its opening; off the event loop if it scores a whole text."""
        request = self._generation.request
        if request.num_logprobs is None and request.prompt_logprobs is None:
            return make()
        return await asyncio.to_thread(make)

    def _events(self, news: ChoiceDelta) -> bytes:
        """Encode a delta; one that shows nothing yet (half a character or call) has no event."""
        events = b""
        choice = news.choice
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            opening = self._answer.opening(choice)
            events += self._event(opening, choice) if opening is not None else b""
        self._progress.take(news)
        chunk = self._answer.chunk(news)
        return events + (self._event(chunk, choice) if chunk is not None else b"")

    def _event(self, chunk: msgspec.Struct, choice: Choice) -> bytes:
        if self._generation.reports_progress:
            progress = self._progress.report(choice)
            chunk = msgspec.structs.replace(chunk, prefixfleet=progress)
        return self._show(chunk)

    def _show(self, chunk: msgspec.Struct) -> bytes:
        return self._shape.take(msgspec.json.encode(chunk))

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

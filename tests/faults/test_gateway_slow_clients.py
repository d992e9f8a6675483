"""Clients that read late, or not at all: the engine waits for them, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from router.config import StaticReplica
from tests.conditions import until
from tests.router.running_gateway import ACME_KEY, Running, chat, gateway_spec, running_gateway

NUM_CHUNKS = 1500
CHUNK = msgspec.json.encode(
    {"choices": [{"index": 0, "delta": {"content": 16_000 * "x"}, "finish_reason": None}]}
)
"""In all 24 MB, more than the buffers on the way take together."""


class TalkativeEngine:
    """A stock engine that streams more than anybody can buffer; `num_sent` chunks so far."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_aborted = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for _ in range(NUM_CHUNKS):
                await response.write(b"data: " + CHUNK + b"\n\n")
                self.num_sent += 1
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def unread_stream(
    *, write_timeout_s: float
) -> AsyncIterator[tuple[Running, TalkativeEngine, asyncio.StreamReader]]:
    """Ask for a long stream over a connection of its own, and read nothing of it."""
    engine, app = TalkativeEngine(), web.Application()
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/chat/completions", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    replica = StaticReplica(url=f"http://127.0.0.1:{runner.addresses[0][1]}", kind="vllm")
    spec = gateway_spec(replicas=(replica,), write_timeout_s=write_timeout_s)
    async with running_gateway(spec, replicas=0, with_index=False) as running:
        address = urlsplit(running.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = msgspec.json.encode(chat("tell me all", stream=True))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ACME_KEY}\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            yield running, engine, reader
        finally:
            writer.transport.abort()
            await runner.cleanup()


async def stalls(engine: TalkativeEngine) -> None:
    """Return when an engine has begun, and has got rid of nothing for a tenth of a second."""
    seen: list[int] = []

    def has_stalled() -> bool:
        seen.append(engine.num_sent)
        return engine.num_sent > 0 and len(seen) > 20 and seen[-20] == engine.num_sent

    await until(has_stalled)


async def test_an_engine_waits_for_a_client_that_reads_late() -> None:
    async with unread_stream(write_timeout_s=30.0) as (running, engine, reader):
        await stalls(engine)
        assert engine.num_sent < NUM_CHUNKS
        received = await reader.read(-1)
        assert received.count(CHUNK) == NUM_CHUNKS
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert running.num_active() == 0


async def test_a_client_that_reads_nothing_is_given_up_and_its_engine_freed() -> None:
    async with unread_stream(write_timeout_s=0.2) as (running, engine, _):
        await until(lambda: engine.num_aborted == 1)
        await until(lambda: not running.gateway.admission.num_admitted)
        assert running.num_active() == 0

"""A replica's front over a real engine core in this process: scripted tokens, tiny tokenizer.

`running_replica` serves it on a free loopback port exactly as production does (with handler
cancellation), and gives access to the core for exact assertions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
from aiohttp import web

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.frontend.encoder import Encoder
from engine.frontend.prompt import PromptEncoder
from engine.scripted_executor import ScriptedExecutor, StepCost
from kvindex.foundation.clock import SystemClock
from tests.engine.frontend.tiny_tokenizer import MAX_MODEL_LEN, VOCAB_SIZE, tiny_bundle
from worker.core.inproc_client import AsyncInprocClient
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend
from worker.server.app import build_app
from worker.server.front import ReplicaFront
from worker.server.spec import ReplicaSpec

NUM_BLOCKS = 129


@dataclass(slots=True)
class RunningReplica:
    """A replica that listens; `url` has no trailing slash."""

    url: str
    front: ReplicaFront
    core: EngineCore
    client: AsyncInprocClient
    session: aiohttp.ClientSession

    @property
    def num_free_blocks(self) -> int:
        return self.core.kv_cache.pool.num_free

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, and every block is free."""
        return not self.core.has_work and self.num_free_blocks == NUM_BLOCKS - 1

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Post JSON (or raw bytes) and return status and JSON answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()


def replica_spec(**changes: Any) -> ReplicaSpec:
    fields: dict[str, Any] = {
        "replica_id": "r0",
        "port": 0,
        "model_folder": "unused",
        "executor": "scripted",
        "served_models": ("tiny",),
        "engine": EngineConfig(check_integrity=True, max_num_batched_tokens=64),
    }
    return ReplicaSpec(**(fields | changes))


def scripted_core(config: EngineConfig, *, step_s: float = 0.0) -> EngineCore:
    """An engine core whose steps take `step_s`."""
    executor = ScriptedExecutor(
        num_blocks=NUM_BLOCKS,
        block_size=config.block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        cost=StepCost(base_s=step_s),
        sleep=time.sleep if step_s else None,
        grammars=LlguidanceBackend(tiny_grammar_tokenizer, vocab_size=VOCAB_SIZE),
    )
    return EngineCore(config, executor, SystemClock())


def tiny_grammar_tokenizer() -> GrammarTokenizer:
    bundle = tiny_bundle()
    return GrammarTokenizer.of(bundle, Encoder(bundle))


@asynccontextmanager
async def running_replica(*, step_s: float = 0.0, **spec: Any) -> AsyncIterator[RunningReplica]:
    clock = SystemClock()
    front = ReplicaFront(replica_spec(**spec), tiny_bundle(), clock)
    core = scripted_core(front.spec.engine, step_s=step_s)
    client = await AsyncInprocClient.start(core, clock)
    front.become_ready(
        client, PromptEncoder(front.bundle, clock=clock, max_model_len=core.max_model_len)
    )
    async with serving(front, core, client) as replica:
        yield replica


@asynccontextmanager
async def serving(
    front: ReplicaFront, core: EngineCore, client: AsyncInprocClient
) -> AsyncIterator[RunningReplica]:
    """Serve a front that is ready; closes it and its engine in the end."""
    async with served(front) as url, aiohttp.ClientSession() as session:
        try:
            yield RunningReplica(url, front, core, client, session)
        finally:
            await client.close()
            front.close()


@asynccontextmanager
async def served(front: ReplicaFront) -> AsyncIterator[str]:
    """Serve a front on a free port and give its URL."""
    runner = web.AppRunner(build_app(front), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def official_client(replica: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return OpenAI's own client of a replica; it never tries twice."""
    async with openai.AsyncOpenAI(
        base_url=replica.url + "/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


async def until(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Wait until a condition holds; fail with TimeoutError after the deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the condition is another object's state)
            await asyncio.sleep(0.005)

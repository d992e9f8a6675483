"""A stock vLLM as a bridge and a gateway meet it: HTTP, KV events, a prefix cache in blocks of 32.

It tokenizes with the tiny tokenizer, hashes by its own scheme and hits what it really holds.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.events import WireHash
from kvindex.foundation.clock import SystemClock
from tests.engine.frontend.tiny_tokenizer import MAX_MODEL_LEN, tiny_bundle
from tests.kvindex.foreign_engine import BLOCK, ForeignEngine, ForeignPrompt
from tests.router.fake_replica import MODEL

CHAT_FIELDS = ("messages", "model", "add_generation_prompt")


class FakeVllm:
    """One engine on a free loopback port; needs a running loop.

    `tells_events` False is a version without `/kv_event_sources`. `publishes` False keeps its
    cache to itself. `root` is the model folder that it names.
    """

    def __init__(self, *, bundle: TokenizerBundle | None = None, root: str | None = None) -> None:
        self.stream = ForeignEngine()
        self.bodies: list[dict[str, Any]] = []
        self.tells_events = True
        self.publishes = True
        self.url = ""
        self._root = root
        self._cached: dict[WireHash, ForeignPrompt] = {}
        self._runner: web.AppRunner | None = None
        self.become(bundle or tiny_bundle())

    def become(self, bundle: TokenizerBundle) -> None:
        """Start again, empty, with this tokenizer."""
        self._encoder = PromptEncoder(bundle, clock=SystemClock(), max_model_len=MAX_MODEL_LEN)
        self._cached.clear()
        self.stream.restart()

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """End like a killed process."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.stream.close()

    async def evict_all(self) -> None:
        """Evict every block, one event each."""
        cached, self._cached = self._cached, {}
        for name, prompt in reversed(cached.items()):
            place = prompt.names.index(name)
            await self.stream.say(*prompt.removed(place, place + 1))

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": MODEL,
            "owned_by": "vllm",
            "root": self._root,
            "parent": None,
            "max_model_len": MAX_MODEL_LEN,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{MODEL}"'
        return web.Response(
            text=f"# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} 3.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 2.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
            f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0",num_gpu_blocks="1456"}} 1.0\n'
        )

    async def _sources(self, request: web.Request) -> web.Response:
        if not self.tells_events:
            return web.json_response({"detail": "Not Found"}, status=404)
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.stream.endpoint.replace("127.0.0.1", "*"),
            "replay_endpoint": self.stream.replay_endpoint.replace("127.0.0.1", "*"),
        }
        return web.json_response({"0": source})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self._tokens(await request.json())
        return web.json_response({"count": len(tokens), "tokens": tokens})

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            fields = {name: body[name] for name in CHAT_FIELDS if name in body}
            return self._encoder.chat(parse_chat_request(msgspec.json.encode(fields)))
        fields = {"model": body["model"], "prompt": body["prompt"]}
        return self._encoder.completion(parse_completion_request(msgspec.json.encode(fields)))[0]

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return await self._answer(body, "chat.completion", choice)

    async def _completion(self, request: web.Request) -> web.Response:
        choice = {"index": 0, "finish_reason": "stop", "text": "yes"}
        return await self._answer(await request.json(), "text_completion", choice)

    async def _answer(
        self, body: dict[str, Any], kind: str, choice: dict[str, Any]
    ) -> web.Response:
        self.bodies.append(body)
        tokens = self._tokens(body)
        cached = await self._compute(ForeignPrompt(tokens, salt=body.get("cache_salt")))
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": 1,
            "total_tokens": len(tokens) + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return web.json_response(
            {"id": "v", "created": 1, "model": MODEL, "object": kind}
            | {"choices": [choice], "usage": usage}
        )

    async def _compute(self, prompt: ForeignPrompt) -> int:
        """Hit, then cache and announce the rest; return the hit in tokens."""
        names = prompt.names
        held = next((i for i, name in enumerate(names) if name not in self._cached), len(names))
        self._cached.update({name: prompt for name in names[held:]})
        if held < len(names) and self.publishes:
            await self.stream.say(prompt.stored(held))
        return min(held, (len(prompt.tokens) - 1) // BLOCK) * BLOCK

"""A replica as the gateway meets it: HTTP, registry record, lease and index entries, no engine.

It answers one word per token, caches what it has served block for block, and misbehaves on
demand. It hashes by the same code as everybody else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kvindex.hashing import Adapter, HashScheme, hash_tokens, known_answer
from kvindex.index import IndexOp, LoadReport, PrefixIndex, SequencedOps, Target
from kvindex.registry import ModelIdentity, Registry, ReplicaRecord
from tests.engine.frontend.tiny_tokenizer import MAX_MODEL_LEN, tiny_bundle

MODEL = "tiny"
TOKEN = "internal-token-of-the-fleet"
LEASE_S = 60.0
SCHEME = HashScheme()
BUNDLE = tiny_bundle()
IDENTITY = ModelIdentity(
    model=MODEL,
    tokenizer_digest=BUNDLE.tokenizer_digest,
    template_digest=BUNDLE.template_digest,
)


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """What the next requests meet; the defaults serve.

    `status` answers with an error. `hang_at` stops answering before that word for ever, `die_at`
    closes the connection there, `truncate_at` ends the body there without an end marker, and
    `hold` is waited for before the first word. `num_words` are generated.
    """

    status: int | None = None
    error: dict[str, Any] = field(default_factory=lambda: {"message": "no", "type": "x"})
    hang_at: int | None = None
    die_at: int | None = None
    truncate_at: int | None = None
    garbage_at: int | None = None
    hold: asyncio.Event | None = None
    num_words: int = 3


class FakeReplica:
    """One replica on a free loopback port. `bodies` holds what it was sent, newest last."""

    def __init__(self, replica_id: str, *, model: str = MODEL) -> None:
        self.id = replica_id
        self.model = model
        self.behaviour = Behaviour()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_running = 0
        self.num_aborted = 0
        self.num_resets = 0
        self.gives_tokenizer = True
        self.url = ""
        self.epoch = 0
        self._cached: set[bytes] = set()
        self._adapters: dict[str, Adapter] = {}
        self._seq = 0
        self._index: PrefixIndex | None = None
        self._registry: Registry | None = None
        self._runner: web.AppRunner | None = None

    @property
    def target(self) -> Target:
        return Target(self.id)

    async def start(self, *, port: int = 0) -> None:
        """Listen on a free port, or that one; serves without registering."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/tokenizer", self._tokenizer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/reset_prefix_cache", self._reset)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close the listener and every connection, like a process that was killed."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def register(
        self, registry: Registry, index: PrefixIndex, **changes: Any
    ) -> ReplicaRecord:
        """Take a lease in the index and publish the record; `changes` are fields of it."""
        self._registry, self._index = registry, index
        self.epoch = await index.register(self.target, boot_ns=self.epoch + 1, lease_s=LEASE_S)
        self._seq = 0
        self._cached.clear()
        fields: dict[str, Any] = {
            "id": self.id,
            "kind": "prefixfleet",
            "url": self.url,
            "epoch": self.epoch,
            "served_models": (self.model,),
            "identity": IDENTITY,
            "hash_scheme": SCHEME,
            "known_answer": known_answer(SCHEME),
            "max_model_len": MAX_MODEL_LEN,
        }
        record = ReplicaRecord(**(fields | changes))
        self._adapters = {one.name: Adapter(one.name, one.path) for one in record.adapters}
        await registry.publish(record, lease_s=LEASE_S)
        await self.report(LoadReport(mode="EXACT"))
        return record

    async def report(self, report: LoadReport) -> None:
        """Renew the lease with a load report."""
        assert self._index is not None
        assert await self._index.renew(self.target, self.epoch, lease_s=LEASE_S, report=report)

    async def leave(self) -> None:
        """Withdraw record and lease."""
        assert self._index is not None
        assert self._registry is not None
        await self._registry.withdraw(self.id)
        await self._index.deregister(self.target, self.epoch)

    def forget_silently(self) -> None:
        """Lose every cached block without a word to the index."""
        self._cached.clear()

    async def _tokenizer(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        if not self.gives_tokenizer:
            return web.Response(body=msgspec.msgpack.encode(tiny_bundle(add_bos=False)))
        return web.Response(body=msgspec.msgpack.encode(BUNDLE))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.num_resets += 1
        await self._publish([IndexOp(kind="cleared")])
        self._cached.clear()
        return web.json_response({"success": True})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        def chunk(text: str | None, finish: str | None) -> dict[str, Any]:
            delta = {"role": "assistant"} if text is None else {"content": text}
            return {"index": 0, "delta": delta, "finish_reason": finish}

        return await self._generate(request, "chat.completion.chunk", chunk, opening=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        def chunk(text: str | None, finish: str | None) -> dict[str, Any]:
            return {"index": 0, "text": text or "", "finish_reason": finish}

        return await self._generate(request, "text_completion", chunk, opening=False)

    async def _generate(
        self,
        request: web.Request,
        kind: str,
        choice: Callable[[str | None, str | None], dict[str, Any]],
        *,
        opening: bool,
    ) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        behaviour = self.behaviour
        if behaviour.status is not None:
            return web.json_response({"error": behaviour.error}, status=behaviour.status)
        self.num_running += 1
        try:
            usage = await self._compute(body, behaviour)
            if not body.get("stream"):
                return web.json_response(_whole(kind, usage, behaviour, self.model))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            base = {"id": "fake-1", "created": 1, "model": self.model, "object": kind}
            start = _start(body)
            if opening and not start:
                opening_event = {**base, "choices": [choice(None, None)]}
                await _send(response, _with_progress(opening_event, body, None))
            for i in range(start, behaviour.num_words):
                if not await self._misbehave(request, response, i):
                    return response
                finish = "stop" if i == behaviour.num_words - 1 else None
                event = {**base, "choices": [choice(f"w{i} ", finish)]}
                await _send(response, _with_progress(event, body, i))
            if body.get("stream_options", {}).get("include_usage"):
                await _send(response, {**base, "choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    async def _misbehave(self, request: web.Request, response: web.StreamResponse, i: int) -> bool:
        """Do what the behaviour asks for at word `i`; False when the answer is over."""
        behaviour = self.behaviour
        if behaviour.hang_at == i:
            await asyncio.Event().wait()
        if behaviour.garbage_at == i:
            await response.write(b"data: {not json\n\n")
        if behaviour.die_at == i:
            assert request.transport is not None
            request.transport.abort()
            return False
        if behaviour.truncate_at == i:
            await response.write_eof()
            return False
        return True

    async def _compute(self, body: dict[str, Any], behaviour: Behaviour) -> dict[str, Any]:
        """Wait as told, then look up and store the prompt's blocks; return the usage."""
        if behaviour.hold is not None:
            await behaviour.hold.wait()
        extension = body.get("prefixfleet") or {}
        tokens: list[int] = extension.get("prompt_token_ids") or []
        hashes = hash_tokens(
            tokens,
            SCHEME,
            cache_salt=extension.get("cache_salt"),
            adapter=self._adapters.get(body["model"]),
        )
        usable = max(0, (len(tokens) - 1) // SCHEME.block_size)
        held = next((i for i, h in enumerate(hashes) if h not in self._cached), len(hashes))
        new = [block for block in hashes if block not in self._cached]
        self._cached.update(new)
        if new and self._index is not None:
            await self._publish([IndexOp(kind="stored", hashes=tuple(new))])
        return {
            "prompt_tokens": len(tokens),
            "completion_tokens": behaviour.num_words,
            "total_tokens": len(tokens) + behaviour.num_words,
            "prompt_tokens_details": {
                "cached_tokens": min(held, usable) * SCHEME.block_size,
            },
        }

    async def _publish(self, ops: list[IndexOp]) -> None:
        assert self._index is not None
        batch = SequencedOps(self._seq, tuple(ops))
        result = await self._index.apply(self.target, self.epoch, [batch])
        assert result.status == "applied", result
        self._seq += 1


def _whole(kind: str, usage: dict[str, Any], behaviour: Behaviour, model: str) -> dict[str, Any]:
    text = "".join(f"w{i} " for i in range(behaviour.num_words))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if kind == "text_completion":
        choice["text"] = text
    else:
        choice["message"] = {"role": "assistant", "content": text}
    return {
        "id": "fake-1",
        "created": 1,
        "model": model,
        "object": kind.removesuffix(".chunk"),
        "choices": [choice],
        "usage": usage,
    }


def _with_progress(event: dict[str, Any], body: dict[str, Any], word: int | None) -> dict[str, Any]:
    """Add what a gateway has asked for; `word` None before the first one."""
    if not (body.get("prefixfleet") or {}).get("return_token_ids"):
        return event
    new, length = ([], 0) if word is None else ([word], _text_length(word))
    return {**event, "prefixfleet": {"choice": 0, "token_ids": new, "text_length": length}}


def _start(body: dict[str, Any]) -> int:
    """Return the word to go on with: the first, unless another replica has begun."""
    resume = (body.get("prefixfleet") or {}).get("resume")
    if resume is None:
        return 0
    (choice,) = resume["choices"]
    assert choice["text_length"] == _text_length(len(choice["token_ids"]) - 1)
    return len(choice["token_ids"])


def _text_length(word: int) -> int:
    """Return the characters up to and including a word."""
    return len("".join(f"w{i} " for i in range(word + 1)))


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def key_hash(key: str) -> str:
    """Return a key as the configuration holds it."""
    return hashlib.sha256(key.encode()).hexdigest()

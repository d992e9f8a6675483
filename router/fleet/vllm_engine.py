"""A stock vLLM over HTTP: what it serves, how it does, where it publishes, how it tokenizes.

It reads answers and raises ReplicaFailure for bad ones; what follows from them is the bridge's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvindex.hashing import Adapter
from kvindex.index import LoadReport
from router.fleet.client import ReplicaClient, ReplicaFailure

TIMEOUT_S = 5.0
T = TypeVar("T")

_LINE = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CONFIG = "cache_config_info"


class EventEndpoints(msgspec.Struct, frozen=True):
    """Where one engine core publishes; `replay` None: it keeps nothing to be asked for."""

    events: str
    replay: str | None = None

    def of_rank(self, rank: int) -> EventEndpoints:
        """Return the endpoints of another core: vLLM adds the rank to its ports."""
        replay = None if self.replay is None else _add_to_port(self.replay, rank)
        return EventEndpoints(_add_to_port(self.events, rank), replay)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is. `root` is the model folder it was started with, if it says.

    `block_size` and `num_blocks` are None when its metrics do not tell.
    """

    served_models: tuple[str, ...]
    adapters: dict[str, Adapter]
    max_model_len: int
    root: str | None
    block_size: int | None
    num_blocks: int | None


class _Card(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Source(msgspec.Struct, frozen=True):
    endpoint: str
    enable_kv_cache_events: bool = True
    replay_endpoint: str | None = None


class VllmEngine:
    """One engine at a URL; `headers` authenticate every call."""

    def __init__(self, url: str, *, client: ReplicaClient, headers: Mapping[str, str]) -> None:
        self.url = url
        self._client = client
        self._headers = headers

    async def facts(self) -> EngineFacts:
        """Ask what the engine is."""
        models = await self._get("/v1/models", _Models)
        models_served = [card for card in models.data if card.parent is None]
        adapters = {
            card.id: Adapter(card.id, card.root or "")
            for card in models.data
            if card.parent is not None
        }
        config = next((labels for name, labels, _ in await self._metrics() if name == _CONFIG), {})
        lengths = [card.max_model_len for card in models_served if card.max_model_len]
        return EngineFacts(
            served_models=tuple(card.id for card in models_served),
            adapters=adapters,
            max_model_len=min(lengths, default=0),
            root=next((card.root for card in models_served if card.root), None),
            block_size=_whole(config.get("block_size")),
            num_blocks=_whole(config.get("num_gpu_blocks")),
        )

    async def loads(self) -> dict[int, LoadReport]:
        """Ask how each engine core does, by rank; vLLM measures no rates that we could use."""
        found: dict[int, dict[str, float]] = {}
        for name, labels, value in await self._metrics():
            rank = labels.get("engine", "0")
            if rank.isdigit() and name != _CONFIG:
                found.setdefault(int(rank), {})[name] = value
        return {
            rank: LoadReport(
                num_running=int(values.get("num_requests_running", 0)),
                num_waiting=int(values.get("num_requests_waiting", 0)),
                kv_usage=values.get("kv_cache_usage_perc", 0.0),
            )
            for rank, values in found.items()
        }

    async def is_healthy(self) -> bool:
        """Ask whether the engine core behind the server runs."""
        try:
            await self._client.get(f"{self.url}/health", headers=self._headers, timeout_s=TIMEOUT_S)
        except ReplicaFailure:
            return False
        return True

    async def event_endpoints(self) -> EventEndpoints | None:
        """Ask where rank 0 publishes its KV events; None when it does not say, or does not."""
        try:
            sources = await self._get("/kv_event_sources", dict[str, _Source])
        except ReplicaFailure:
            return None
        source = sources.get("0")
        if source is None or not source.enable_kv_cache_events:
            return None
        host = urlsplit(self.url).hostname or "127.0.0.1"
        replay = (
            None if source.replay_endpoint is None else _reachable(source.replay_endpoint, host)
        )
        return EventEndpoints(_reachable(source.endpoint, host), replay)

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Have a prompt, or a conversation, turned into token ids."""
        sent = msgspec.json.encode(body)
        url = f"{self.url}/tokenize"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._client.post(url, sent, headers=self._headers, replica=self.url)
                with answer:
                    return _decode(await answer.read(), _Tokens, url).tokens
        except TimeoutError:
            raise ReplicaFailure("timeout", f"{url}: no answer in {TIMEOUT_S:g} s") from None

    async def _get(self, path: str, kind: type[T]) -> T:
        url = f"{self.url}{path}"
        body = await self._client.get(url, headers=self._headers, timeout_s=TIMEOUT_S)
        return _decode(body, kind, url)

    async def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """Read the engine's own metrics: name, labels and value of each."""
        url = f"{self.url}/metrics"
        body = await self._client.get(url, headers=self._headers, timeout_s=TIMEOUT_S)
        return [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _LINE.findall(body.decode("utf-8", "replace"))
        ]


def _decode(body: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ReplicaFailure("status", f"{url}: {error}", status=200) from None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _reachable(endpoint: str, host: str) -> str:
    """Turn what an engine binds into what we connect to."""
    for everywhere in ("*", "0.0.0.0", "[::]", "::"):
        if endpoint.startswith(f"tcp://{everywhere}:"):
            return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    return endpoint


def _add_to_port(endpoint: str, rank: int) -> str:
    address, colon, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if colon and port.isdigit() else endpoint

"""Talks to a live gateway or replica over HTTP: one completion, and the admin questions around it.

It measures what a client sees. What answers mean for a replay is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from sim.live.fleet_settings import FleetAddress
from sim.live.messages import Completion, Holdings, LiveFleet, LiveRecord, Received

_SILENCE_S = 600.0
_POLL_S = 0.005
_DATA = b"data: "
_DONE = b"[DONE]"

AnswerT = TypeVar("AnswerT")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: _ErrorBody | None = None


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_chunks = msgspec.json.Decoder(_Chunk)


class LiveClient:
    """One session with a fleet; use `connected`."""

    def __init__(self, session: aiohttp.ClientSession, address: FleetAddress) -> None:
        self._session = session
        self._address = address

    @property
    def has_admin(self) -> bool:
        """Whether the gateway can be asked what it decided."""
        return self._address.admin_url is not None

    async def models(self) -> list[str]:
        """Return the models that the key may use."""
        url = f"{self._address.url}/v1/models"
        cards = await self._json("GET", url, self._address.key, _Cards)
        return [card.id for card in cards.data]

    async def only_model(self) -> str:
        """Return the one model that there is; raise ConfigError when it must be named."""
        models = await self.models()
        if len(models) != 1:
            raise ConfigError(f"--model: name one of {', '.join(models) or 'none'}")
        return models[0]

    async def complete(self, wanted: Completion) -> Received:
        """Ask for one completion and read all of it; an error answer is a result, not raised.

        Raises DependencyError when nothing answers.
        """
        body: dict[str, object] = {
            "model": wanted.model,
            "prompt": wanted.prompt,
            "max_tokens": wanted.num_output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": wanted.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if wanted.session is not None:
            body["prompt_cache_key"] = wanted.session
        if wanted.priority:
            body["priority"] = wanted.priority
        url = f"{self._address.url}/v1/completions"
        sent_at = time.monotonic()
        try:
            async with self._session.post(
                url, data=msgspec.json.encode(body), headers=_headers(self._address.key)
            ) as response:
                return await _receive(response, sent_at)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DependencyError(f"{url} does not answer: {error}") from None

    async def fleet(self) -> LiveFleet:
        """List the replicas."""
        return await self._admin("GET", "/admin/replicas", LiveFleet)

    async def reset_cache(self, replica: str) -> None:
        """Make a replica forget its cached blocks; raise PrefixFleetError while it is busy."""
        path = f"/admin/replicas/{replica}/reset_prefix_cache"
        done: dict[str, Any] = await self._admin("POST", path, dict[str, Any])
        if done.get("success") is not True:
            raise PrefixFleetError(
                f"replica {replica} did not reset its cache; is other traffic running?"
            )

    async def record(self, request_id: str, *, within_s: float) -> LiveRecord | None:
        """Return what the gateway decided; it is there soon after the answer's end, else None."""
        path, deadline = f"/admin/decisions/{request_id}", time.monotonic() + within_s
        while True:
            status, body = await self._call("GET", self._admin_url(path), self._address.admin_key)
            if status != 404:
                return _decoded(path, status, body, LiveRecord)
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_S)

    async def holds(self, prompt: Sequence[int], *, model: str, tenant: str) -> Holdings:
        """Ask the index how much of a prompt every target holds."""
        asked = {"prompt": prompt, "model": model, "tenant": tenant}
        return await self._admin("POST", "/admin/index/explain", Holdings, asked)

    async def _admin(
        self, method: str, path: str, kind: type[AnswerT], body: object = None
    ) -> AnswerT:
        return await self._json(method, self._admin_url(path), self._address.admin_key, kind, body)

    def _admin_url(self, path: str) -> str:
        assert self._address.admin_url is not None, "there is no admin API to ask"
        return f"{self._address.admin_url}{path}"

    async def _json(
        self, method: str, url: str, key: str | None, kind: type[AnswerT], body: object = None
    ) -> AnswerT:
        status, answer = await self._call(method, url, key, body)
        return _decoded(url, status, answer, kind)

    async def _call(
        self, method: str, url: str, key: str | None, body: object = None
    ) -> tuple[int, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, url, data=data, headers=_headers(key)
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DependencyError(f"{url} does not answer: {error}") from None


@asynccontextmanager
async def connected(address: FleetAddress) -> AsyncIterator[LiveClient]:
    """Open a session for the block; any number of requests may run at once."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=address.trust.context())
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield LiveClient(session, address)


async def _receive(response: aiohttp.ClientResponse, sent_at: float) -> Received:
    headers = response.headers
    predicted = headers.get("x-prefixfleet-cached-tokens-predicted")
    seen = Received(
        sent_at=sent_at,
        status=response.status,
        request_id=headers.get("x-request-id"),
        replica=headers.get("x-prefixfleet-replica"),
        num_predicted_tokens=None if predicted is None else int(predicted),
    )
    if response.status != 200:
        error = _error_message(await response.read())
        return msgspec.structs.replace(seen, error=error or f"status {response.status}")
    token_at: list[float] = []
    usage: _Usage | None = None
    async for line in response.content:
        if not line.startswith(_DATA) or line[len(_DATA) :].strip() == _DONE:
            continue
        try:
            chunk = _chunks.decode(line[len(_DATA) :])
        except msgspec.DecodeError as error:
            return msgspec.structs.replace(seen, error=f"a chunk that cannot be read: {error}")
        if chunk.error is not None:
            return msgspec.structs.replace(seen, error=chunk.error.message or "unnamed error")
        if chunk.choices:
            token_at.append(time.monotonic() - sent_at)
        usage = chunk.usage or usage
    if usage is None:
        return msgspec.structs.replace(seen, error="the stream ended without usage")
    details = usage.prompt_tokens_details
    return msgspec.structs.replace(
        seen,
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens,
        num_cached_tokens=(details.cached_tokens or 0) if details is not None else None,
        token_at=tuple(token_at),
    )


def _headers(key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers if key is None else headers | {"authorization": f"Bearer {key}"}


def _decoded(place: str, status: int, body: bytes, kind: type[AnswerT]) -> AnswerT:
    if status != 200:
        reason = _error_message(body) or f"status {status}"
        raise PrefixFleetError(f"{place}: {reason}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise PrefixFleetError(f"{place}: an answer that cannot be read: {error}") from None


def _error_message(body: bytes) -> str | None:
    try:
        chunk = _chunks.decode(body)
    except msgspec.DecodeError:
        return None
    return chunk.error.message if chunk.error is not None else None

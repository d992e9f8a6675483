"""Connections to replicas, kept for the next request: opened when needed, closed when idle.

It knows URLs, and nothing of what is asked there.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from router.fleet.connection import Connection

IDLE_S = 15.0
"""An idle connection is closed after this time, or up to as long later."""
_OF_EVERY_REQUEST = "accept: */*\r\nuser-agent: prefixfleet\r\n"
_PORTS = {"http": 80, "https": 443}
_AS_IT_IS = "/?:@!$&'()*+,;=-._~%[]"


class _Origin(NamedTuple):
    """What a connection is good for."""

    host: str
    port: int
    is_tls: bool


class _Place(NamedTuple):
    """A URL taken apart: where it leads, what is asked for there, and what each request says."""

    origin: _Origin
    target: str
    headers: str


class Connections:
    """Connections by origin; each serves one request at a time."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[_Origin, list[tuple[float, Connection]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def take(self, url: str) -> Connection:
        """Return a connection for one request, a new one where none is idle.

        Raises OSError, or TimeoutError, when none can be opened, ValueError for a URL that is none.
        """
        origin = _place(url).origin
        idle = self._idle.get(origin)
        while idle:
            _, connection = idle.pop()
            if connection.is_reusable:
                return connection
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection,
                origin.host,
                origin.port,
                ssl=self._tls_context() if origin.is_tls else None,
            )
        return connection

    def give_back(self, url: str, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end; close any other."""
        if not connection.is_reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.setdefault(_place(url).origin, []).append((loop.time(), connection))
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._close_idle)

    def close(self) -> None:
        """Close what is idle."""
        if self._timer is not None:
            self._timer.cancel()
        self._close_until(float("inf"))

    def _close_idle(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        self._close_until(loop.time() - IDLE_S)
        if self._idle:
            self._timer = loop.call_later(IDLE_S, self._close_idle)

    def _close_until(self, instant: float) -> None:
        """Close connections that were given back before an instant."""
        for origin, idle in list(self._idle.items()):
            for given_back_at, connection in idle:
                if given_back_at < instant:
                    connection.close()
            idle[:] = [kept for kept in idle if kept[0] >= instant]
            if not idle:
                del self._idle[origin]

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def request_head(method: str, url: str, headers: Mapping[str, str], *, num_bytes: int) -> bytes:
    """Write the head of a request with a body of so many bytes.

    Raises ValueError for a URL that is none, or a header that would be several.
    """
    place = _place(url)
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines):
        raise ValueError("a header to be sent holds a line break")
    return (
        f"{method} {place.target} HTTP/1.1\r\n{place.headers}content-length: {num_bytes}\r\n"
        f"{text}\r\n"
    ).encode()


@lru_cache(maxsize=4096)
def _place(url: str) -> _Place:
    """Take a URL apart; raise ValueError when it is none."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of HTTP")
    headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n{_OF_EVERY_REQUEST}"
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers += f"authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
    target = quote(f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", _AS_IT_IS)
    port = parts.port or _PORTS[parts.scheme]
    return _Place(_Origin(parts.hostname, port, parts.scheme == "https"), target, headers)

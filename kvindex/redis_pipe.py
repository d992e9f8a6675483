"""Scripts over one connection to one Redis: sent together, answered in order, no round trip waits.

A pool of connections costs a read and a write of its own for every call; here calls that are made
in one turn of the event loop leave in one write. EVALSHA and EVAL go there; everything else goes
through the client's pool. Only redis:// and unix:// are served, see kvindex/redis_connect.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.typing import EncodableT

_WATCH_S = 0.05


class PipedRedis(Redis):
    """A client of one server whose scripts share one connection; the rest uses its pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scripts = ScriptPipe(self.connection_pool.connection_kwargs)

    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: EncodableT) -> Any:
        """Run a script that the server knows; NoScriptError when it does not."""
        return await self._scripts.call(_pack("EVALSHA", sha, numkeys, *keys_and_args))

    async def eval(self, script: str, numkeys: int, *keys_and_args: EncodableT) -> Any:
        """Run a script, which the server knows from now on."""
        return await self._scripts.call(_pack("EVAL", script, numkeys, *keys_and_args))

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Release connections."""
        self._scripts.close()
        await super().aclose(close_connection_pool)


class ScriptPipe:
    """One connection, opened by the first call and again after it was lost.

    A call that a lost connection leaves without an answer is made once more: every script of ours
    may run twice. A cancelled call's answer is thrown away.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Take redis-py's connection options."""
        self._options = options
        self._wire: _Wire | None = None
        self._connecting = asyncio.Lock()

    async def call(self, frame: bytes) -> Any:
        """Send a command and return its answer.

        Raises what redis-py raises: ConnectionError, TimeoutError, ResponseError.
        """
        try:
            return await (await self._connected()).call(frame)
        except RedisConnectionError:
            return await (await self._connected()).call(frame)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _connected(self) -> _Wire:
        if self._wire is not None and self._wire.is_open:
            return self._wire
        async with self._connecting:
            if self._wire is None or not self._wire.is_open:
                self._wire = await self._connect()
            return self._wire

    async def _connect(self) -> _Wire:
        options, loop = self._options, asyncio.get_running_loop()
        timeout_s = options.get("socket_timeout")
        try:
            async with asyncio.timeout(options.get("socket_connect_timeout")):
                if "path" in options:
                    _, wire = await loop.create_unix_connection(
                        lambda: _Wire(timeout_s), options["path"]
                    )
                else:
                    host, port = options.get("host", "localhost"), options.get("port", 6379)
                    _, wire = await loop.create_connection(lambda: _Wire(timeout_s), host, port)
                await self._greet(wire)
        except TimeoutError:
            raise RedisTimeoutError("no connection in time") from None
        except OSError as error:
            raise RedisConnectionError(str(error)) from None
        return wire

    async def _greet(self, wire: _Wire) -> None:
        """Say who we are and which database we mean."""
        options = self._options
        if options.get("password"):
            user = [options["username"]] if options.get("username") else []
            await wire.call(_pack("AUTH", *user, options["password"]))
        if options.get("db"):
            await wire.call(_pack("SELECT", int(options["db"])))


class _Wire(asyncio.Protocol):
    """One connection: frames out, answers in, the oldest call's first."""

    def __init__(self, timeout_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(replyError=_reply_error)
        self._frames: list[bytes] = []
        self._calls: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RedisConnectionError(f"connection lost: {exc or 'closed by the server'}"))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            answer = self._reader.gets()
            while answer is not False:
                _, call = self._calls.popleft()
                if not call.done():
                    _settle(call, answer)
                answer = self._reader.gets()
        except (hiredis.ProtocolError, IndexError) as error:
            self._fail(RedisConnectionError(f"not the protocol of Redis: {error}"))

    async def call(self, frame: bytes) -> Any:
        """Send a frame with those of this turn, and wait for its answer."""
        if not self.is_open:
            raise RedisConnectionError("connection lost")
        call: asyncio.Future[Any] = self._loop.create_future()
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)
        self._calls.append((self._loop.time(), call))
        if self._watch is None and self._timeout_s is not None:
            self._watch = self._loop.call_later(_WATCH_S, self._look)
        return await call

    def close(self) -> None:
        """Close at once; calls without an answer fail."""
        self._fail(RedisConnectionError("connection closed"))

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self.is_open:
            self._transport.write(b"".join(frames))

    def _look(self) -> None:
        """Give the connection up when its oldest call is too old: the answers come in order."""
        self._watch = None
        if not self._calls or self._timeout_s is None:
            return
        if self._loop.time() - self._calls[0][0] > self._timeout_s:
            self._fail(RedisTimeoutError(f"no answer within {self._timeout_s:g} s"))
        else:
            self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        calls, self._calls = self._calls, deque()
        for _, call in calls:
            if not call.done():
                call.set_exception(error)
        self._transport.abort()


def _settle(call: asyncio.Future[Any], answer: Any) -> None:
    if isinstance(answer, Exception):
        call.set_exception(answer)
    else:
        call.set_result(answer)


def _reply_error(message: str) -> Exception:
    if message.startswith("NOSCRIPT"):
        return NoScriptError(message)
    return ResponseError(message)


def _pack(*words: EncodableT) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # a wrong stub
    return packed

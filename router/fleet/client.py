"""HTTP towards replicas: one session, and every way an attempt can fail as one exception.

It knows addresses, tokens and time limits; which replica is called, and whether a failure is
tried again, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

import aiohttp

from kvindex.foundation.errors import PrefixFleetError

FailureCause = Literal["connect", "timeout", "lost", "stalled", "gave_up", "status", "drained"]

_MAX_ERROR_BYTES = 64 * 1024
_DRAIN_S = 0.5
_AT_ONCE_S = 0.05
_ANSWERS_OF_THE_CLIENTS_MAKING = frozenset({400, 405, 409, 413, 415, 422})


class ReplicaFailure(PrefixFleetError):
    """Raised when a replica did not serve an attempt.

    `cause`: it could not be connected, gave no first token in time, went away, stalled, said in
    its stream that it cannot go on, answered with `status` (then `body` is what it said), or was
    told to end and takes no more (`drained`). Only what speaks against the replica
    `trips_breaker`; what would fail on every replica is not `is_retriable`.
    """

    kind = "replica_lost"

    def __init__(
        self,
        cause: FailureCause,
        message: str,
        *,
        status: int | None = None,
        body: bytes = b"",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s

    @property
    def trips_breaker(self) -> bool:
        """Connect errors, time-outs, lost connections and 5xx do; a 4xx or a drain never does."""
        return self.cause != "drained" and (self.status is None or self.status >= 500)

    @property
    def is_retriable(self) -> bool:
        """Whether another replica may do better."""
        return self.status not in _ANSWERS_OF_THE_CLIENTS_MAKING


class Upstream:
    """The answer of a replica, status 200, its body still to be read; closed as a context."""

    def __init__(self, response: aiohttp.ClientResponse, replica: str) -> None:
        self._response = response
        self._replica = replica
        self.content_type = response.content_type

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    async def read(self) -> bytes:
        """Read the whole body; raise ReplicaFailure `lost` when it ends early."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(self._replica, error) from None

    async def next_piece(self) -> bytes:
        """Wait for more of the body and return all that has come, b"" at its end.

        Raises ReplicaFailure `lost` when it ends early.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(self._replica, error) from None

    async def drain(self) -> None:
        """Read what follows the end marker, so that the connection can serve the next request.

        A replica that says more than that within a short while loses the connection instead.
        """
        if self._response.content.at_eof():
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._response.content.read(_MAX_ERROR_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return


class ReplicaClient:
    """A pool of connections to any number of replicas, with no limit of its own.

    The number of requests is bounded at admission; a limit here would let one stuck replica hold
    up all others.
    """

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the session; needs the running loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str], replica: str
    ) -> Upstream:
        """Send a JSON body and return the answer; raise ReplicaFailure unless it is 200.

        The answer is a context: to leave it before the body was read closes the connection, which
        aborts the request in the replica.
        """
        assert self._session is not None, "start() has not been called"
        sent = {"content-type": "application/json", **headers}
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            response = await self._session.post(url, data=body, headers=sent, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(replica, error, after_s=loop.time() - started_at) from None
        if response.status == 200:
            return Upstream(response, replica)
        try:
            raise await _refused(replica, response)
        finally:
            response.close()

    async def get(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Fetch a document; raise ReplicaFailure unless the answer is 200 and in time."""
        return await self._exchange("GET", url, headers=headers, timeout_s=timeout_s)

    async def post_small(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Send a POST without a body; raise ReplicaFailure unless the answer is 200, in time."""
        return await self._exchange("POST", url, headers=headers, timeout_s=timeout_s)

    async def _exchange(
        self, method: str, url: str, *, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        assert self._session is not None, "start() has not been called"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, url, headers=dict(headers), allow_redirects=False
                ) as response,
            ):
                if response.status != 200:
                    raise await _refused(url, response)
                return await response.read()
        except TimeoutError:
            raise ReplicaFailure("timeout", f"{url}: no answer in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(url, error, after_s=timeout_s) from None


def _unreachable(replica: str, error: Exception, *, after_s: float) -> ReplicaFailure:
    """Name what went wrong before any answer.

    A connection that is closed at once had been idle, and its replica was about to close it: the
    request has not run there.
    """
    if isinstance(error, aiohttp.ServerTimeoutError | aiohttp.ConnectionTimeoutError):
        return ReplicaFailure("connect", f"{replica}: no connection in time")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL):
        return ReplicaFailure("connect", f"{replica}: {error}")
    if after_s < _AT_ONCE_S:
        return ReplicaFailure("connect", f"{replica} closed the connection at once")
    return _lost(replica, error)


def _lost(replica: str, error: Exception) -> ReplicaFailure:
    detail = str(error) or type(error).__name__
    return ReplicaFailure("lost", f"{replica} went away: {detail}")


async def _refused(replica: str, response: aiohttp.ClientResponse) -> ReplicaFailure:
    body = await response.content.read(_MAX_ERROR_BYTES)
    return ReplicaFailure(
        "status",
        f"{replica} answered {response.status}",
        status=response.status,
        body=body,
        retry_after_s=_retry_after_s(response.headers.get("retry-after")),
    )


def _retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After in seconds; the date form and nonsense count as absent."""
    return float(header) if header and header.isdigit() else None

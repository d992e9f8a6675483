"""HTTP towards replicas: kept connections, and every way an attempt can fail as one exception.

It knows addresses, tokens and time limits; which replica is called, and whether a failure is
tried again, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from kvindex.foundation.errors import PrefixFleetError
from router.fleet.connection import Connection
from router.fleet.connections import Connections, request_head

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
    """The answer of a replica, its body still to be read; closed as a context."""

    def __init__(
        self, connection: Connection, connections: Connections, *, url: str, replica: str
    ) -> None:
        self._connection = connection
        self._connections = connections
        self._url = url
        self._replica = replica

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self._connections.give_back(self._url, self._connection)

    async def read(self) -> bytes:
        """Read the whole body; raise ReplicaFailure `lost` when it ends early."""
        pieces = []
        while data := await self.next_piece():
            pieces.append(data)
        return b"".join(pieces)

    async def next_piece(self) -> bytes:
        """Wait for more of the body and return all that has come, b"" at its end.

        Raises ReplicaFailure `lost` when it ends early.
        """
        try:
            return await self._connection.next_piece()
        except ConnectionError as error:
            raise _lost(self._replica, error) from None

    def offer(self, take: Callable[[bytes], bool]) -> None:
        """Offer pieces of the body to `take` first, see `Connection.offer`."""
        self._connection.offer(take)

    async def drain(self) -> None:
        """Read what follows the end marker, so that the connection can serve the next request.

        A replica that says more than that within a short while loses the connection instead.
        """
        connection = self._connection
        if connection.is_complete:
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                await connection.next_piece()
        except (TimeoutError, ConnectionError):
            return


class ReplicaClient:
    """HTTP to any number of replicas; as many connections as there are requests.

    The number of requests is bounded at admission; a limit here would let one stuck replica hold
    up all others.
    """

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._connections = Connections(connect_timeout_s=connect_timeout_s)

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str], replica: str
    ) -> Upstream:
        """Send a JSON body and return the answer; raise ReplicaFailure unless it is 200.

        The answer is a context: to leave it before the body was read closes the connection, which
        aborts the request in the replica.
        """
        sent = {"content-type": "application/json", **headers}
        return await self._ask("POST", url, sent, body, replica)

    async def get(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Fetch a document; raise ReplicaFailure unless the answer is 200 and in time."""
        return await self._exchange("GET", url, headers=headers, timeout_s=timeout_s)

    async def post_small(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Send a POST without a body; raise ReplicaFailure unless the answer is 200, in time."""
        return await self._exchange("POST", url, headers=headers, timeout_s=timeout_s)

    async def _exchange(
        self, method: str, url: str, *, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                with await self._ask(method, url, headers, b"", url) as answer:
                    return await answer.read()
        except TimeoutError:
            raise ReplicaFailure("timeout", f"{url}: no answer in {timeout_s:g} s") from None

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, replica: str
    ) -> Upstream:
        """Send a request and return its answer; raise ReplicaFailure unless it is 200."""
        loop, connections = asyncio.get_running_loop(), self._connections
        try:
            head = request_head(method, url, headers, num_bytes=len(body))
            connection = await connections.take(url)
        except TimeoutError:
            raise ReplicaFailure("connect", f"{replica}: no connection in time") from None
        except (OSError, ValueError) as error:
            raise ReplicaFailure("connect", f"{replica}: cannot connect: {error}") from None
        sent_at = loop.time()
        try:
            connection.send((head, body))
            status = await connection.head()
        except ConnectionError as error:
            raise _without_answer(replica, error, after_s=loop.time() - sent_at) from None
        except BaseException:
            connection.close()
            raise
        answer = Upstream(connection, connections, url=url, replica=replica)
        if status == 200:
            return answer
        with answer:
            raise await _refused(replica, connection, answer)


def _without_answer(replica: str, error: Exception, *, after_s: float) -> ReplicaFailure:
    """Name what went wrong before any answer.

    A connection that is closed at once had been idle, and its replica was about to close it: the
    request has not run there.
    """
    if isinstance(error, ConnectionResetError) and after_s < _AT_ONCE_S:
        return ReplicaFailure("connect", f"{replica} closed the connection at once")
    return _lost(replica, error)


def _lost(replica: str, error: Exception) -> ReplicaFailure:
    return ReplicaFailure("lost", f"{replica} went away: {error}")


async def _refused(replica: str, connection: Connection, answer: Upstream) -> ReplicaFailure:
    """Read what a replica says instead of an answer, as far as it matters."""
    body = b""
    while len(body) < _MAX_ERROR_BYTES and (data := await answer.next_piece()):
        body += data
    return ReplicaFailure(
        "status",
        f"{replica} answered {connection.status}",
        status=connection.status,
        body=body[:_MAX_ERROR_BYTES],
        retry_after_s=_retry_after_s(connection.headers.get(b"retry-after")),
    )


def _retry_after_s(header: bytes | None) -> float | None:
    """Read a Retry-After in seconds; the date form and nonsense count as absent."""
    return float(header) if header and header.isdigit() else None

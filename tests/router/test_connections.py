"""HTTP towards replicas: connections are kept while they can be, and whatever comes has a name."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.fleet.client import ReplicaClient, ReplicaFailure
from router.fleet.connection import MAX_HEAD_BYTES, MAX_WAITING_BYTES
from router.fleet.connections import Connections, request_head
from tests.certificates import Authority
from tests.conditions import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class RawServer:
    """Answers each request with the next of some bytes; b"" at the end of them closes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_gone = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = [
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.startswith(b"content-length:")
                ]
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if self.answers[:1] == [b""]:
                    self.answers.pop(0)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_gone += 1
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(
    *answers: bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[RawServer, ReplicaClient]]:
    """Run a server and a client of it."""
    server, client = RawServer(*answers), ReplicaClient(connect_timeout_s=5.0)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
    try:
        yield server, client
    finally:
        client.close()
        listener.close()


async def get(server: RawServer, client: ReplicaClient, path: str = "/x") -> bytes:
    return await client.get(server.url + path, headers={}, timeout_s=5.0)


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with raw_server(OK, CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", OK) as (server, client):
        assert [await get(server, client) for _ in range(3)] == [b"ok", b"abc", b"ok"]
        assert server.num_connections == 1


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with raw_server(OK, OK) as (server, client):
        answers = await asyncio.gather(*(get(server, client) for _ in range(2)))
        assert (answers, server.num_connections) == ([b"ok", b"ok"], 2)


@pytest.mark.parametrize(
    "last",
    [
        OK.replace(b"200 OK", b"200 OK\r\nconnection: close"),
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmore",
        OK + b"more",
    ],
)
async def test_a_connection_that_is_not_clean_is_not_used_again(last: bytes) -> None:
    async with raw_server(last, OK) as (server, client):
        assert [await get(server, client) for _ in range(2)] == [b"ok", b"ok"]
        assert server.num_connections == 2


async def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    async with raw_server(OK, b"") as (server, _):
        connections = Connections(connect_timeout_s=5.0)
        first = await connections.take(server.url)
        first.send([request_head("GET", server.url, {}, num_bytes=0)])
        assert (await first.head(), await first.next_piece()) == (200, b"ok")
        connections.give_back(server.url, first)
        await until(lambda: not first.is_reusable)
        second = await connections.take(server.url)
        assert second is not first
        second.close()
        connections.close()


async def test_a_replica_that_closes_at_once_had_not_begun() -> None:
    async with raw_server(b"", b"") as (server, client):
        with pytest.raises(ReplicaFailure, match="closed the connection at once") as caught:
            await get(server, client)
        assert caught.value.cause == "connect"


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\n\r\nall of it", b"") as (server, client):
        assert await get(server, client) == b"all of it"


async def test_an_early_hint_is_no_answer() -> None:
    async with raw_server(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK) as (server, client):
        assert await get(server, client) == b"ok"


async def test_what_stands_behind_a_body_is_of_that_answer_alone() -> None:
    with_trailer = CHUNKED + b"2\r\nok\r\n0\r\nretry-after: 7\r\n\r\n"
    refusal = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
    async with raw_server(with_trailer, refusal) as (server, client):
        assert await get(server, client) == b"ok"
        with pytest.raises(ReplicaFailure) as caught:
            await get(server, client)
        assert (caught.value.retry_after_s, server.num_connections) == (None, 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "is not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + MAX_HEAD_BYTES * b"y", "headers exceed 65536 bytes"),
    ],
)
async def test_what_is_no_answer_is_told(answer: bytes, reason: str) -> None:
    async with raw_server(answer, b"") as (server, client):
        with pytest.raises(ReplicaFailure, match=reason) as caught:
            await get(server, client)
        assert caught.value.cause == "lost"


@pytest.mark.parametrize("cut", [CHUNKED + b"5\r\nab", OK[:-1]])
async def test_a_body_that_ends_early_is_lost(cut: bytes) -> None:
    async with raw_server(cut, b"") as (server, client):
        with pytest.raises(ReplicaFailure, match="it closed the connection") as caught:
            await get(server, client)
        assert caught.value.cause == "lost"


async def test_a_refusal_is_told_with_what_it_says() -> None:
    answer = b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\ncontent-length: 4\r\n\r\nbusy"
    async with raw_server(answer, OK) as (server, client):
        with pytest.raises(ReplicaFailure) as caught:
            await get(server, client)
        failure = caught.value
        assert (failure.status, failure.body, failure.retry_after_s) == (429, b"busy", 7.0)
        assert (await get(server, client), server.num_connections) == (b"ok", 1)


async def test_to_leave_an_answer_closes_its_connection() -> None:
    async with raw_server(CHUNKED + b"2\r\nab\r\n") as (server, client):
        with await client.post(server.url, b"{}", headers={}, replica="r0") as upstream:
            assert await upstream.next_piece() == b"ab"
        await until(lambda: server.num_gone == 1)


async def test_a_replica_waits_for_whoever_does_not_read() -> None:
    size = 40 * MAX_WAITING_BYTES
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + size * b"x"
    async with raw_server(answer) as (server, client):
        with await client.post(server.url, b"", headers={}, replica="r0") as upstream:
            first = await upstream.next_piece()
            assert len(first) < size
            assert len(first) + len(await upstream.read()) == size


async def test_a_request_names_its_host_and_what_its_url_says() -> None:
    async with raw_server(OK) as (server, client):
        url = server.url.replace("//", "//user:a%3Ab@") + "/a path?x=1&y=é"
        await client.post_small(url, headers={"x-request-id": "r1"}, timeout_s=5.0)
        (request,) = server.requests
    host = server.url.removeprefix("http://").encode()
    assert request.split(b"\r\n") == [
        b"POST /a%20path?x=1&y=%C3%A9 HTTP/1.1",
        b"host: " + host,
        b"accept: */*",
        b"user-agent: prefixfleet",
        b"authorization: Basic dXNlcjphOmI=",
        b"content-length: 0",
        b"x-request-id: r1",
        b"",
        b"",
    ]


@pytest.mark.parametrize("url", ["replica:8000", "ftp://replica/", "http:///x", "http://x:y/"])
async def test_an_address_that_is_none_is_a_failure_to_connect(url: str) -> None:
    client = ReplicaClient(connect_timeout_s=5.0)
    with pytest.raises(ReplicaFailure) as caught:
        await client.get(url, headers={}, timeout_s=5.0)
    assert caught.value.cause == "connect"


@pytest.mark.parametrize("value", ["x\r\nevil: y", "x\nevil: y", "x\revil: y"])
def test_a_header_cannot_smuggle_in_another(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head("GET", "http://r0/", {"authorization": value}, num_bytes=0)


async def test_what_is_taken_where_it_arrives_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.fleet.connection.MAX_WAITING_BYTES", 4)
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return True

    body = 300_000 * b"1\r\nx\r\n"  # More than is read at once.
    async with raw_server(CHUNKED + body + b"0\r\n\r\n") as (server, client):
        with await client.post(server.url, b"", headers={}, replica="r0") as upstream:
            upstream.offer(take)
            rest = await upstream.read()
    assert len(b"".join(taken)) + len(rest) == 300_000
    assert len(taken) > 1


async def test_a_replica_that_speaks_tls_has_to_prove_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.certificate, issued.key)
    async with raw_server(OK, tls=tls) as (server, client):
        with pytest.raises(ReplicaFailure, match="certificate verify failed") as caught:
            await get(server, client)
        assert caught.value.cause == "connect"
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with raw_server(OK, OK, tls=tls) as (server, client):
        assert [await get(server, client) for _ in range(2)] == [b"ok", b"ok"]
        assert server.num_connections == 1

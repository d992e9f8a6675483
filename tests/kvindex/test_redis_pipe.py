"""Scripts over one connection: in order, through restarts, and never waiting for ever."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from redis.exceptions import ResponseError

from kvindex.config import RedisConfig
from kvindex.foundation.errors import DependencyError
from kvindex.redis_connect import connect
from kvindex.redis_pipe import PipedRedis
from tests.redis_server import RedisServer

ECHO = "return {KEYS[1], ARGV[1]}"


def piped(server: RedisServer, path: str = "", *, call_timeout_s: float = 5.0) -> PipedRedis:
    client = connect(
        server.url.removesuffix("/0") + path, RedisConfig(call_timeout_s=call_timeout_s)
    )
    assert isinstance(client, PipedRedis)
    return client


async def echo(client: PipedRedis, word: str) -> list[bytes]:
    found: list[bytes] = await client.eval(ECHO, 1, "k", word)
    return found


async def test_calls_of_one_turn_are_answered_each_with_its_own(private_redis: RedisServer) -> None:
    client = piped(private_redis)
    answers = await asyncio.gather(*(echo(client, str(i)) for i in range(200)))
    assert answers == [[b"k", b"%d" % i] for i in range(200)]
    assert (await client.info("clients"))["connected_clients"] == 2  # The pool's, for INFO.
    await client.aclose()


async def test_a_cancelled_call_leaves_the_order_of_the_others(private_redis: RedisServer) -> None:
    client = piped(private_redis)
    await echo(client, "first")
    calls = [asyncio.ensure_future(echo(client, str(i))) for i in range(6)]
    await asyncio.sleep(0)
    calls[2].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers.pop(2), asyncio.CancelledError)
    assert answers == [[b"k", b"%d" % i] for i in (0, 1, 3, 4, 5)]
    await client.aclose()


async def test_an_error_of_a_script_is_its_callers_alone(private_redis: RedisServer) -> None:
    client = piped(private_redis)
    failing = client.eval("return redis.call('NO')", 1, "k")
    answers = await asyncio.gather(failing, echo(client, "x"), return_exceptions=True)
    assert isinstance(answers[0], ResponseError)
    assert answers[1] == [b"k", b"x"]
    await client.aclose()


async def test_a_restarted_server_is_found_again(private_redis: RedisServer) -> None:
    client = piped(private_redis)
    await echo(client, "before")
    private_redis.restart()
    assert await echo(client, "after") == [b"k", b"after"]
    await client.aclose()


async def test_a_server_that_hangs_fails_what_waits_and_is_left(private_redis: RedisServer) -> None:
    client = piped(private_redis, call_timeout_s=0.2)
    await echo(client, "before")
    os.kill(private_redis.pid, signal.SIGSTOP)
    try:
        failed = await asyncio.gather(
            *(echo(client, "x") for _ in range(3)), return_exceptions=True
        )
    finally:
        os.kill(private_redis.pid, signal.SIGCONT)
    assert [str(error) for error in failed] == ["no answer within 0.2 s"] * 3
    assert await echo(client, "again") == [b"k", b"again"]
    await client.aclose()


async def test_a_database_and_a_password_are_respected(private_redis: RedisServer) -> None:
    plain = piped(private_redis)
    await plain.config_set("requirepass", "secret")
    with pytest.raises(ResponseError, match="NOAUTH"):
        await echo(piped(private_redis), "x")
    url = f"redis://:secret@127.0.0.1:{private_redis.port}/3"
    client = connect(url)
    assert isinstance(client, PipedRedis)
    await client.eval("return redis.call('SET', KEYS[1], ARGV[1])", 1, "k", "v")
    assert await client.get("k") == b"v"  # The pool is in database 3, as its URL says.
    await client.aclose()
    await plain.aclose()


async def test_nobody_listening_is_a_dependency_error(private_redis: RedisServer) -> None:
    from kvindex.redis_index import RedisIndex

    private_redis.kill()
    index = RedisIndex(piped(private_redis), "pool")
    with pytest.raises(DependencyError, match=f"127.0.0.1:{private_redis.port}"):
        await index.match([])
    await index.close()

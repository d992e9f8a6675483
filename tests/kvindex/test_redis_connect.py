"""Connections to Redis: URLs, masked passwords, time limits, and what a server must be like."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.index import Target
from kvindex.redis_connect import check_server, connect, dependency_errors, mask_url, server_name
from kvindex.redis_index import RedisIndex
from tests.redis_server import RedisServer, free_port


@contextmanager
def serving(*options: str, persistent: bool = False) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="pf-redis-"))
    server = RedisServer(folder, options=options, persistent=persistent)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://user:secret@host:1/0", "redis://user:***@host:1/0"),
        ("rediss://:s@cret@host/2", "rediss://:***@host/2"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_a_password_is_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://user:secret@host:7/3", "redis://host:7/3"),
        ("redis://", "redis://localhost:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0"),
    ],
)
def test_a_server_is_named_without_user_and_password(url: str, name: str) -> None:
    assert server_name(connect(url)) == name


@pytest.mark.parametrize("url", ["http://host", "host:6379", "", "redis://:secret@host:port/0"])
def test_an_unusable_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert mask_url(url) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["connect_timeout_s", "call_timeout_s"])
def test_a_time_limit_must_be_positive(field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"{field} must be above 0, not 0"):
        msgspec.convert({field: 0}, RedisConfig)


def test_both_stores_are_one_server_unless_told_otherwise() -> None:
    assert RedisConfig().resolved_state_url == "embedded"
    assert RedisConfig(index_url="redis://a").resolved_state_url == "redis://a"
    both = RedisConfig(index_url="redis://a", state_url="redis://b")
    assert both.resolved_state_url == "redis://b"


async def test_an_unreachable_server_is_named_with_a_remedy() -> None:
    port = free_port()
    index = RedisIndex(connect(f"redis://u:secret@127.0.0.1:{port}/0"), "pool")
    with pytest.raises(DependencyError) as caught:
        await index.match([])
    assert f"Redis at redis://127.0.0.1:{port}/0: " in str(caught.value)
    assert "check that the server runs" in str(caught.value)
    assert "secret" not in str(caught.value)
    await index.close()


async def test_a_server_that_never_answers_costs_one_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        index = RedisIndex(connect(url, RedisConfig(call_timeout_s=0.2)), "pool")
        start = time.monotonic()
        with pytest.raises(DependencyError, match="no answer within"):
            await index.match([])
        assert time.monotonic() - start < 1.0
        await index.close()


async def test_a_client_connects_again_by_itself(private_redis: RedisServer) -> None:
    index = RedisIndex(connect(private_redis.url), "pool")
    await index.register(Target("a"), boot_ns=1, lease_s=60)
    private_redis.restart()
    assert await index.match([]) == []
    await index.register(Target("a"), boot_ns=1, lease_s=60)
    assert len(await index.match([])) == 1
    await index.close()


async def test_scripts_are_sent_again_when_the_server_forgot_them(
    private_redis: RedisServer,
) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(redis, "pool")
    await index.register(Target("a"), boot_ns=1, lease_s=60)
    await redis.script_flush()
    assert [match.epoch for match in await index.match([])] == [1]
    await index.close()


async def test_a_cancellation_that_redis_py_swallows_is_raised_again() -> None:
    redis = connect("redis://")
    started = asyncio.Event()

    async def call() -> None:
        with dependency_errors(redis):
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        pytest.fail("the task went on")

    task = asyncio.create_task(call())
    await started.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_write_to_a_closed_transport_says_that_the_server_is_gone() -> None:
    """What uvloop raises when the connection breaks while redis-py writes to it."""
    redis = connect("redis://localhost:1")
    with pytest.raises(DependencyError, match="the handler is closed"), dependency_errors(redis):
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")


def test_braces_in_a_pool_name_are_refused() -> None:
    with pytest.raises(ValueError, match="must not contain braces"):
        RedisIndex(connect("redis://"), "a}b")


async def test_a_fit_server_gives_no_warning() -> None:
    with serving(persistent=True) as server:
        redis = connect(server.url)
        assert await check_server(redis, must_persist=True) == []
        await redis.aclose()


async def test_a_server_without_persistence_gives_a_warning_where_it_matters(
    shared_redis: RedisServer,
) -> None:
    redis = connect(shared_redis.url)
    assert await check_server(redis, must_persist=False) == []
    (warning,) = await check_server(redis, must_persist=True)
    assert shared_redis.url in warning
    assert "set appendonly yes" in warning
    await redis.aclose()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_keys_is_refused(policy: str) -> None:
    with serving("--maxmemory", "100mb", "--maxmemory-policy", policy) as server:
        redis = connect(server.url)
        with pytest.raises(DependencyError, match=f"maxmemory-policy {policy}.*noeviction"):
            await check_server(redis, must_persist=False)
        await redis.aclose()


async def test_a_server_with_bounded_memory_that_never_evicts_is_fit() -> None:
    with serving("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        redis = connect(server.url)
        assert await check_server(redis, must_persist=False) == []
        await redis.aclose()


async def test_an_unreachable_server_cannot_be_checked() -> None:
    redis = connect(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(DependencyError, match="Redis at redis://127"):
        await check_server(redis, must_persist=False)
    await redis.aclose()

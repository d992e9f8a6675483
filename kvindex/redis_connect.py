"""Connections to Redis: from a URL to a client with short timeouts, and a check of the server.

It knows no keys and no scripts.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError

from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.redis_many import cluster_name, connect_by_sentinel, connect_cluster, primaries_info
from kvindex.redis_pipe import PipedRedis

MIN_VERSION = (6, 2)
_FAILURES = (RedisError, RedisClusterException, OSError, RuntimeError)


def mask_url(url: str) -> str:
    """Return the URL with its password replaced by `***`."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***{at}{host}"))


def connect(url: str, config: RedisConfig | None = None) -> Redis:
    """Return a client of what `url` names; nothing is sent until the first command.

    A lost connection is opened again by the next command. Raises ConfigError, naming the URL and
    what is allowed, when the URL cannot be used.
    """
    options = config or RedisConfig()
    settings: dict[str, Any] = {
        "socket_connect_timeout": options.connect_timeout_s,
        "socket_timeout": options.call_timeout_s,
        # One retry, and only for a connection that the server closed while it was idle in the
        # pool: every script of ours may run twice, but no caller should wait for more than one
        # timeout.
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        "protocol": 2,
    }
    scheme = urlsplit(url).scheme
    try:
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return connect_by_sentinel(url, settings)
        if scheme in ("redis+cluster", "rediss+cluster"):
            return connect_cluster(url, settings)
        if scheme in ("redis", "unix"):
            return PipedRedis.from_url(url, **settings)
        if scheme == "rediss":
            return Redis.from_url(url, **settings)
    except ValueError as error:
        raise ConfigError(f"Redis URL {mask_url(url)!r}: {error}") from None
    raise ConfigError(
        f"Redis URL {mask_url(url)!r}: expected redis://host:port/db, rediss://... for TLS, "
        "unix:///path/to/socket, redis+sentinel://host:port,host:port/service/db, "
        "or redis+cluster://host:port,host:port"
    )


def server_name(redis: Redis) -> str:
    """Return the URL of a client's server, without user and password."""
    if isinstance(redis, RedisCluster):
        return cluster_name(redis)
    pool = redis.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return f"redis+sentinel://{pool.service_name}"
    options: dict[str, Any] = pool.connection_kwargs
    database = options.get("db") or 0
    if "path" in options:
        return f"unix://{options['path']}?db={database}"
    return f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{database}"


def dependency_errors(redis: Redis) -> AbstractContextManager[None]:
    """Turn what redis-py raises inside the block into DependencyError with server and remedy.

    redis-py awaits its writes with asyncio.wait_for, which on Python 3.11 swallows a cancellation
    that arrives as the write ends; it is raised again here, or the task would never end. A write
    to a connection that breaks at that moment comes out of uvloop as a bare RuntimeError.
    """
    return _DependencyErrors(redis)


class _DependencyErrors:
    """What `dependency_errors` returns; a generator would take three times as many calls."""

    __slots__ = ("_num_cancelled", "_redis", "_task")

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._num_cancelled = self._task.cancelling() if self._task else 0

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, _FAILURES):
            return
        if self._task and self._task.cancelling() > self._num_cancelled:
            raise asyncio.CancelledError
        if error is not None:
            raise DependencyError(
                f"Redis at {server_name(self._redis)}: {error or type(error).__name__}; check that "
                f"the server runs and that redis.index_url / redis.state_url are right"
            ) from error


async def check_server(redis: Redis, *, must_persist: bool) -> list[str]:
    """Return warnings about the server, or every primary of a cluster, empty when fit for us.

    Raises DependencyError when one cannot be reached, is older than 6.2, or may evict our keys
    (`maxmemory` set with a policy other than `noeviction`).
    """
    with dependency_errors(redis):
        if isinstance(redis, RedisCluster):
            infos: dict[str, dict[str, Any]] = await primaries_info(redis)
        else:
            infos = {server_name(redis): await redis.info()}
    warnings = [_check(name, info, must_persist=must_persist) for name, info in infos.items()]
    return [warning for warning in warnings if warning is not None]


def _check(name: str, info: dict[str, Any], *, must_persist: bool) -> str | None:
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise DependencyError(f"Redis at {name} is version {version}; 6.2 or newer is needed")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if int(info.get("maxmemory", 0)) > 0 and policy != "noeviction":
        raise DependencyError(
            f"Redis at {name} may evict our keys (maxmemory-policy {policy}); "
            f"set it to noeviction, or use a server of its own"
        )
    if must_persist and not int(info.get("aof_enabled", 0)):
        return (
            f"Redis at {name} keeps no append-only file: tenants, keys and usage since the last "
            f"dump are lost when it restarts; set appendonly yes"
        )
    return None

"""Clients of more than one server: the primary that sentinels name, and the nodes of a cluster.

URLs name several servers, `redis+cluster://host:port,host:port`; the rest of a URL means what it
means for one server. It knows no keys; kvindex/redis_connect.py decides what a URL asks for.
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel

SENTINEL_PORT = 26379
CLUSTER_PORT = 6379
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


def connect_by_sentinel(url: str, settings: dict[str, Any]) -> Redis:
    """Return a client of the primary that the sentinels name, now and after a failover.

    `redis+sentinel://user:password@host:port,host:port/service/db`; `sentinel_username` and
    `sentinel_password` in the query are for the sentinels. Raises ValueError for another form.
    """
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("expected the service's name as path: /service or /service/db")
    options = _options(url, database) | settings
    asked = {ours: options.pop(name, None) for name, ours in _SENTINEL_OPTIONS.items()}
    of_sentinels = {name: value for name, value in asked.items() if value is not None}
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        _hosts(url, SENTINEL_PORT), sentinel_kwargs={**shared, **settings, **of_sentinels}
    )
    client: Redis = sentinel.master_for(service, **options)
    return client


def connect_cluster(url: str, settings: dict[str, Any]) -> Redis:
    """Return a client of a cluster; any of the named nodes is enough to find the others.

    It has the commands of `Redis` that take one key. Raises ValueError for another form of URL.
    """
    if urlsplit(url).path.strip("/"):
        raise ValueError("a cluster has no databases; leave the path empty")
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, CLUSTER_PORT)]
    cluster = RedisCluster(startup_nodes=nodes, **_options(url, ""), **settings)
    # The two classes share their commands, not an ancestor.
    return cast("Redis", cluster)


def cluster_name(cluster: RedisCluster) -> str:
    """Return the URL of a cluster, without user and password."""
    nodes = cluster.nodes_manager.startup_nodes
    return "redis+cluster://" + ",".join(sorted(nodes))


async def primaries_info(cluster: RedisCluster) -> dict[str, dict[str, Any]]:
    """Return what every primary says of itself, by node."""
    infos: dict[str, Any] = await cluster.info(target_nodes=RedisCluster.PRIMARIES)
    return {f"{cluster_name(cluster)} node {node}": info for node, info in infos.items()}


def _hosts(url: str, port: int) -> list[tuple[str, int]]:
    """Return the servers that a URL names; raise ValueError for a port that is none."""
    hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    found = []
    for host in hosts:
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise ValueError("expected host:port,host:port")
        found.append((one.hostname, one.port or port))
    return found


def _options(url: str, database: str) -> dict[str, Any]:
    """Read user, password, database and query as those of a URL with one server."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    scheme = parts.scheme.partition("+")[0]
    single = f"{scheme}://{user}{at}host/{database}"
    options = dict(parse_url(f"{single}?{parts.query}" if parts.query else single))
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    return options | ({"ssl": True} if scheme == "rediss" else {})

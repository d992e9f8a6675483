"""The index on servers as people run them: a user with least rights, a cluster, an old Redis."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from kvindex.index import LoadReport, SequencedOps
from kvindex.redis_connect import check_server, connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, CLEARED, A, B, Subject, chain, removed, stored
from tests.kvindex.following import record
from tests.redis_server import RedisServer, free_port, running_server, valkey_binary

OLDEST_VARIABLE = "PREFIXFLEET_TEST_REDIS_62"
OLDEST = os.environ.get(OLDEST_VARIABLE)
"""A `redis-server` binary of version 6.2, where there is one."""

OPERATIONS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


async def call(client: Redis, *words: str | int) -> Any:
    return await client.execute_command(*words)  # type: ignore[no-untyped-call]


async def _no_wait(seconds: float) -> None:
    raise AssertionError(f"this test does not wait {seconds} s")


async def use_everything(index: RedisIndex) -> None:
    """Call every operation with a result that shows that it worked."""
    subject, hashes = Subject(index, _no_wait), chain(3000)
    epoch = await subject.filled(A, hashes)
    other = await index.register(B, boot_ns=BOOT_NS, lease_s=60)
    assert await index.load_snapshot(B, other, seq=0, ops=[stored(hashes[:1200], tier="host")])
    assert await subject.matched(hashes) == {"a": 3000, "b": 1200}
    assert await index.renew(A, epoch, lease_s=60, report=LoadReport(mode="EXACT"))
    await index.apply(A, epoch, [SequencedOps(1, (removed(hashes[9:]),))])
    await index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=hashes[9:20])
    assert [m.pending_blocks for m in await index.match(hashes)] == [11, 0]
    await index.release_prefill(A, "r", 0)
    await index.release(A, "r", 0, written=True)
    await index.release(A, "r", 0, written=False)
    await index.apply(B, other, [SequencedOps(1, (CLEARED,))])
    assert await subject.matched(hashes) == {"a": 9, "b": 0}
    assert [state.num_blocks["gpu"] for state in await index.states()] == [9, 0]
    await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    await index.deregister(B, other)
    assert await subject.matched(hashes) == {"a": 0}


def documented_acl() -> list[str]:
    """Return the rule of the operations page as arguments of ACL SETUSER."""
    found = re.search(r"^ACL SETUSER (.*)$", OPERATIONS_PAGE.read_text(), re.M)
    assert found is not None
    return found.group(1).split(" ")


@pytest.mark.parametrize("binary", [None, valkey_binary()], ids=["redis", "valkey"])
async def test_the_documented_least_rights_suffice_and_are_least(binary: str | None) -> None:
    with running_server(binary) as server:
        admin = connect(server.url)
        await call(admin, "ACL", "SETUSER", *documented_acl())
        url = server.url.replace("redis://", "redis://prefixfleet:PASSWORD@")
        client = connect(url)
        assert await check_server(client, must_persist=False) == []
        await use_everything(RedisIndex(client, "pool"))
        registry = RedisRegistry(connect(url), b"secret")
        await registry.publish(record(1), lease_s=60)
        assert await registry.records() == [record(1)]
        await registry.withdraw("a")
        assert await registry.records() == []
        assert await registry.claim("bridge/a", "gw-1", lease_s=60)
        await registry.unclaim("bridge/a", "gw-1")
        for command in (["SET", "other", "1"], ["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "GET", "*"]):
            with pytest.raises(NoPermissionError):
                await call(client, *command)
        await registry.close()
        await client.aclose()
        await admin.aclose()


@pytest.mark.skipif(OLDEST is None, reason=f"{OLDEST_VARIABLE} names no Redis 6.2 server")
async def test_the_oldest_supported_server_does_everything() -> None:
    assert OLDEST is not None
    with running_server(OLDEST) as server:
        client = connect(server.url)
        assert str((await client.info("server"))["redis_version"]).startswith("6.2.")
        assert await check_server(client, must_persist=False) == []
        await use_everything(RedisIndex(client, "pool"))
        await client.aclose()


class Node(NamedTuple):
    """A node of a cluster, the port of its bus, and the first and last slot that it serves."""

    server: RedisServer
    bus_port: int
    first: int
    last: int


@asynccontextmanager
async def cluster() -> AsyncIterator[list[Node]]:
    """Run three nodes that share the slots."""
    with ExitStack() as stack:
        nodes = []
        for first, last in ((0, 5460), (5461, 10922), (10923, 16383)):
            folder = Path(tempfile.mkdtemp(prefix="pf-cluster-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            bus_port = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
            server = RedisServer(folder, options=options)
            server.start()
            stack.callback(server.kill)
            nodes.append(Node(server, bus_port, first, last))
        for node in nodes:
            await join(node, nodes[0])
        yield nodes


async def join(node: Node, first: Node) -> None:
    """Give a node its slots and make it meet the first one."""
    client = connect(node.server.url)
    await call(client, "CLUSTER", "ADDSLOTSRANGE", node.first, node.last)
    if node is not first:
        address = ("127.0.0.1", first.server.port, first.bus_port)
        await call(client, "CLUSTER", "MEET", *address)
    await client.aclose()


async def is_ready(client: Redis) -> bool:
    info: bytes = await call(client, "CLUSTER", "INFO")
    return b"cluster_state:ok" in info


@pytest.mark.slow
async def test_all_operations_of_a_pool_stay_on_one_node_of_a_cluster() -> None:
    """A node refuses what is not in its slots, so any script that left its slot would fail."""
    async with cluster() as nodes:
        clients = [connect(node.server.url) for node in nodes]
        for client in clients:
            await until(partial(is_ready, client))
        used: set[int] = set()
        for i in range(12):
            prefix = f"pf:{{pool-{i}}}:"
            slot = int(await call(clients[0], "CLUSTER", "KEYSLOT", prefix))
            place = next(j for j, node in enumerate(nodes) if node.first <= slot <= node.last)
            await use_everything(RedisIndex(clients[place], f"pool-{i}"))
            used.add(place)
        assert used == {0, 1, 2}
        for client in clients:
            await client.aclose()

"""Clients of a cluster, of a primary behind sentinels, and over TLS: the URL is all it takes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.index import LoadReport, SequencedOps
from kvindex.redis_connect import check_server, connect, mask_url, server_name
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, A, chain, stored
from tests.kvindex.following import record
from tests.kvindex.test_index_deployments import cluster, is_ready, use_everything
from tests.redis_server import RedisServer, free_port

HASHES = chain(5)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis+cluster://user:secret@a:7000,b:7001", "redis+cluster://a:7000,b:7001"),
        ("rediss+cluster://a", "redis+cluster://a:6379"),
        ("redis+sentinel://:secret@a:1,b/main/3", "redis+sentinel://main"),
    ],
)
def test_a_deployment_is_named_without_user_and_password(url: str, name: str) -> None:
    assert server_name(connect(url)) == name
    assert "secret" not in mask_url(url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://a:1,b:2", "expected the service's name as path"),
        ("redis+cluster://a:1/3", "a cluster has no databases"),
        ("redis+cluster://a:x", "Port could not be cast"),
        ("redis+cluster://a:1,", "expected host:port,host:port"),
        ("redis+proxy://a:1", r"redis\+sentinel://host:port,host:port/service/db"),
    ],
)
def test_a_url_that_makes_no_sense_names_what_is_allowed(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        connect(url)


@pytest.mark.slow
async def test_one_url_reaches_every_pool_of_a_cluster() -> None:
    async with cluster() as nodes:
        clients = [connect(node.server.url) for node in nodes]
        for client in clients:
            await until(partial(is_ready, client))
            await client.aclose()
        first = nodes[0].server.port
        url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{first}"
        through = connect(url)
        assert await check_server(through, must_persist=False) == []
        for i in range(12):
            await use_everything(RedisIndex(through, f"pool-{i}"))
        registry = RedisRegistry(through, b"secret")
        await registry.publish(record(1), lease_s=60)
        assert await registry.records() == [record(1)]
        assert await registry.claim("bridge/a", "gw-1", lease_s=60)
        warnings = await check_server(through, must_persist=True)
        assert len(warnings) == 3
        for node in nodes:
            node.server.kill()
        with pytest.raises(DependencyError, match=r"Redis at redis\+cluster://"):
            await registry.records()
        await through.aclose()


@contextmanager
def sentinels(primary: RedisServer, *, number: int = 3) -> Iterator[list[RedisServer]]:
    """Run sentinels that watch a primary as service `main`."""
    with ExitStack() as stack:
        found = []
        for _ in range(number):
            folder = Path(tempfile.mkdtemp(prefix="pf-sentinel-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            config = folder / "sentinel.conf"
            config.write_text(
                f"sentinel monitor main 127.0.0.1 {primary.port} 2\n"
                "sentinel down-after-milliseconds main 500\n"
                "sentinel failover-timeout main 2000\n"
            )
            server = RedisServer(folder, config=config, options=("--sentinel",))
            server.start()
            stack.callback(server.kill)
            found.append(server)
        yield found


@pytest.mark.slow
async def test_the_index_goes_on_with_the_primary_that_the_sentinels_elect() -> None:
    with ExitStack() as stack:
        folders = [Path(tempfile.mkdtemp(prefix="pf-redis-")) for _ in range(2)]
        for folder in folders:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        primary = RedisServer(folders[0])
        primary.start()
        stack.callback(primary.kill)
        replica = RedisServer(folders[1], options=("--replicaof", "127.0.0.1", str(primary.port)))
        replica.start()
        stack.callback(replica.kill)
        watching = stack.enter_context(sentinels(primary))
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in watching)
        client = connect(f"redis+sentinel://{hosts}/main", RedisConfig(call_timeout_s=2.0))
        index = RedisIndex(client, "pool")
        epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
        await index.apply(A, epoch, [SequencedOps(0, (stored(HASHES),))])
        to_replica = connect(replica.url)

        async def is_copied() -> bool:
            info = await to_replica.info("replication")
            return bool(info["master_link_status"] == "up" and info["slave_repl_offset"] > 0)

        await until(is_copied)
        assert [match.matched_blocks for match in await index.match(HASHES)] == [5]
        await until(partial(_knows_replica, watching), seconds=20)
        primary.kill()

        async def goes_on() -> bool:
            try:
                return await index.renew(A, epoch, lease_s=60, report=LoadReport(mode="EXACT"))
            except DependencyError:
                return False

        await until(goes_on, seconds=30)
        assert [match.matched_blocks for match in await index.match(HASHES)] == [5]
        await to_replica.aclose()
        await index.close()


async def _knows_replica(watching: list[RedisServer]) -> bool:
    """Tell whether every sentinel has found the replica and the other sentinels."""
    for sentinel in watching:
        client = connect(sentinel.url)
        state = await client.sentinel_master("main")
        await client.aclose()
        assert isinstance(state, dict)
        if (state["num-slaves"], state["num-other-sentinels"]) != (1, len(watching) - 1):
            return False
    return True


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a key and a certificate of this machine that signs itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate)),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_everything_works_over_tls_and_a_stranger_is_refused() -> None:
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="pf-redis-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        key, certificate = make_certificate(folder)
        tls_port = free_port()
        files = ("--tls-cert-file", certificate, "--tls-key-file", key)
        options = (*files, "--tls-ca-cert-file", certificate, "--tls-port", tls_port)
        server = RedisServer(folder, options=tuple(map(str, options)))
        server.start()
        stack.callback(server.kill)
        mutual = f"ssl_ca_certs={certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"
        client = connect(f"rediss://127.0.0.1:{tls_port}/0?{mutual}")
        assert await check_server(client, must_persist=False) == []
        await use_everything(RedisIndex(client, "pool"))
        await client.aclose()
        for query in ("", f"?ssl_ca_certs={certificate}"):
            stranger = connect(f"rediss://127.0.0.1:{tls_port}/0{query}")
            with pytest.raises(DependencyError, match="Redis at "):
                await check_server(stranger, must_persist=False)
            await stranger.aclose()

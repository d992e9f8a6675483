"""What bench_gateway.py measures: engines, gateways and routers as process groups on this machine.

It starts, registers and stops; it measures nothing but the CPU time and memory of a group.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.fake_engine import MODEL
from benchmarks.timing import flags
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.config import RedisConfig
from kvindex.hashing import HashScheme, known_answer
from kvindex.index import LoadReport, Target
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ModelIdentity, ReplicaRecord, pool_id
from router.config import (
    GatewaySpec,
    Limits,
    RouterConfig,
    StaticReplica,
    TenantConfig,
    TenantKey,
)
from router.launch.ports import any_free_port

KEY = "sk-bench-0123456789abcdef"
SECRET = "secret-of-the-benchmark"
_LEASE_S = 7200.0
_READY_S = 60.0
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = Limits(
    requests_per_minute=10**9, tokens_per_minute=10**12, max_parallel=10**6, tokens_per_day=10**15
)


@dataclass(frozen=True, slots=True)
class Group:
    """A program and its children: the processes of one process group, listening on one port."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    key: str | None = None

    def pids(self) -> list[int]:
        """Return the living members."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
        return found

    def cpu_us(self) -> int:
        """Return user and system time so far, of the living."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * _TICK_US

    def rss_mb(self) -> float:
        """Return resident memory now."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * _PAGE_BYTES / 1e6


@contextmanager
def group(
    name: str, argv: Sequence[str], port: int, *, log: Path, key: str | None = None, **env: str
) -> Iterator[Group]:
    """Run a program in a group of its own; its end ends all of the group."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **env},
        )
    try:
        yield Group(name, process, port, log, key)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a port of this machine's own address that nobody listens on now."""
    return any_free_port("127.0.0.1")


@contextmanager
def program(
    folder: Path, name: str, module: str, settings: msgspec.Struct, *, port: int, key: str
) -> Iterator[Group]:
    """Run a program of ours by its settings."""
    file = folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode(settings))
    argv = [sys.executable, "-P", "-m", module, "--config-json", str(file)]
    path, log = str(Path(__file__).parents[1]), folder / f"{name}.log"
    with group(name, argv, port, log=log, key=key, PYTHONPATH=path) as running:
        wait_ready(running)
        yield running


def router_flags(description: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of routers: model folder and peers."""
    parser = flags(description)
    parser.add_argument("--model", type=Path, help="folder with the tokenizer (the demo model's)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    return parser


@contextmanager
def engines(folder: Path, count: int) -> Iterator[tuple[Group, list[int]]]:
    """Run fake engines, one process for all; yields it and their ports."""
    ports = [free_port() for _ in range(count)]
    argv = [sys.executable, "-m", "benchmarks.fake_engine", "--ports", *map(str, ports)]
    with group("direct", argv, ports[0], log=folder / "engines.log") as running:
        wait_ready(running)
        yield running, ports


@contextmanager
def peer(
    folder: Path, text: str, ports: Sequence[int], *, key: str | None = None
) -> Iterator[Group]:
    """Run a router by NAME=COMMAND; `{port}`, `{free_port}`, `{engines}` (URLs), `{key}` in it."""
    name, _, command = text.partition("=")
    port = free_port()
    urls = " ".join(f"http://127.0.0.1:{engine}" for engine in ports)
    command = command.format(port=port, free_port=free_port(), engines=urls, key=key)
    log = folder / f"{name}.log"
    with group(name, shlex.split(command), port, log=log, key=key) as running:
        wait_ready(running)
        yield running


@contextmanager
def least_load(folder: Path, ports: Sequence[int]) -> Iterator[Group]:
    """Run our gateway before engines that are opaque to it, without Redis."""
    router = RouterConfig(
        port=free_port(),
        admin_port=free_port(),
        default_policy="least_load",
        replicas=tuple(StaticReplica(url=f"http://127.0.0.1:{p}", kind="openai") for p in ports),
    )
    with gateway(folder, "ours, least_load", gateway_spec(router, limits=_UNLIMITED)) as running:
        yield running


@contextmanager
def exact(folder: Path, *, redis_url: str, bundle: TokenizerBundle) -> Iterator[Group]:
    """Run our gateway with index, limits and tokenizer; its replicas must be registered."""
    cache = folder / "cache"
    (cache / "tokenizers").mkdir(parents=True, exist_ok=True)
    name = f"{bundle.tokenizer_digest[:32]}-{bundle.template_digest[:32] or 'none'}.msgpack"
    (cache / "tokenizers" / name).write_bytes(msgspec.msgpack.encode(bundle))
    router = RouterConfig(port=free_port(), admin_port=free_port())
    spec = gateway_spec(router, limits=_UNLIMITED, redis_url=redis_url)
    spec = msgspec.structs.replace(spec, cache_dir=str(cache))
    with gateway(folder, "ours, exact", spec) as running:
        yield running


async def register(ports: Sequence[int], *, redis_url: str, bundle: TokenizerBundle) -> None:
    """Register the engines as replicas of ours, EXACT and idle, for longer than any run."""
    scheme = HashScheme()
    identity = ModelIdentity(
        model=MODEL,
        tokenizer_digest=bundle.tokenizer_digest,
        template_digest=bundle.template_digest,
    )
    registry = RedisRegistry(connect(redis_url), SECRET.encode())
    index = RedisIndex(connect(redis_url), pool_id(MODEL, identity, scheme))
    report = LoadReport(mode="EXACT", prefill_tokens_per_s=1e6, decode_tokens_per_s=1e5)
    for i, port in enumerate(ports):
        target = Target(f"replica-{i}")
        epoch = await index.register(target, boot_ns=time.time_ns(), lease_s=_LEASE_S)
        record = ReplicaRecord(
            id=target.replica,
            kind="prefixfleet",
            url=f"http://127.0.0.1:{port}",
            epoch=epoch,
            served_models=(MODEL,),
            identity=identity,
            hash_scheme=scheme,
            known_answer=known_answer(scheme),
            max_model_len=8192,
            num_blocks=100_000,
        )
        await registry.publish(record, lease_s=_LEASE_S)
        await index.renew(target, epoch, lease_s=_LEASE_S, report=report)
    await registry.close()
    await index.close()


def gateway(folder: Path, name: str, spec: GatewaySpec) -> AbstractContextManager[Group]:
    """Run our gateway by its settings."""
    return program(folder, name, "router.gateway", spec, port=spec.router.port, key=KEY)


def gateway_spec(
    router: RouterConfig, *, limits: Limits, redis_url: str | None = None
) -> GatewaySpec:
    """Return settings of a gateway with one tenant, whose key is `KEY`."""
    key = TenantKey(hash=hashlib.sha256(KEY.encode()).hexdigest())
    tenant = TenantConfig(name="bench", keys=(key,), limits=limits, isolation="shared")
    return GatewaySpec(
        router=router,
        tenants=(tenant,),
        index_url=redis_url,
        redis=RedisConfig() if redis_url is None else RedisConfig(index_url=redis_url),
        fleet_secret=SECRET,
        admin_key="admin-of-the-benchmark",
    )


def wait_ready(running: Group) -> None:
    """Return once a chat is answered with 200; raise RuntimeError when the program cannot."""
    message = {"role": "user", "content": "hi"}
    body = msgspec.json.encode({"model": MODEL, "messages": [message], "max_tokens": 1})
    headers = {"content-type": "application/json"}
    if running.key is not None:
        headers["authorization"] = f"Bearer {running.key}"
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            request = urllib.request.Request(url, data=body, headers=headers)
            urllib.request.urlopen(request, timeout=10).read()
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.msg = f"{error.msg}: {error.read()[:300]!r}"
            if running.process.poll() is not None or time.monotonic() > deadline:
                said = running.log.read_text(errors="replace")[-1000:]
                raise RuntimeError(f"{running.name} does not serve: {error}\n{said}") from None
            time.sleep(0.1)
        else:
            return


class Prompts:
    """Chats of about 2 KB: 64 prefixes, each request with a tail of its own."""

    _WORDS = ("router", "cache", "engine", "token", "prefix", "tenant", "request", "memory")

    def __init__(self, *, num_prefixes: int = 64, num_words: int = 250) -> None:
        source = random.Random(7)
        self._source = source
        self._prefixes = [
            " ".join(source.choice(self._WORDS) for _ in range(num_words))
            for _ in range(num_prefixes)
        ]
        self._number = 0

    def one_turn(self) -> list[dict[str, str]]:
        """Return one message, whose text is new from its end on."""
        return [{"role": "user", "content": f"{self._prefix()} {self._tail()}"}]

    def next_turn(self) -> list[dict[str, str]]:
        """Return a conversation known up to its last message, which is new."""
        return [
            {"role": "system", "content": self._prefix()},
            {"role": "user", "content": self._tail()},
        ]

    def _prefix(self) -> str:
        return self._source.choice(self._prefixes)

    def _tail(self) -> str:
        self._number += 1
        return f"{self._number} {self._source.randrange(10**6)}"

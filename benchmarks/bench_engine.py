"""Speed of one replica on this machine: decode, first token, prefill, bursts, start, memory.

    python -m benchmarks.bench_engine [--quick] [--json] [--dtype D] [--against URL]
        [--against-model NAME] [--against-pid PID]

It starts our engine on the demo model and measures it over HTTP; with --against also a server that
runs already, in turn with ours, on the same prompts. Prompts are token ids that no server has seen
before. --against-pid adds up the resident memory of that process and its children, and stops them
while ours is measured, as ours is stopped while they are: a server that waits by looking again and
again takes a core from the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.timing import Report, Row, flags, machine, show
from router.launch.ports import any_free_port
from worker.cpu.machine import num_cores

_KV_BYTES = 1 << 30
_FIRST_TOKEN, _LAST_TOKEN = 1000, 40_000
_READY_S = 300.0


@dataclass(frozen=True)
class Server:
    """A server under test."""

    url: str
    model: str
    pid: int | None


@dataclass(frozen=True)
class Goal:
    """What a figure is to be, as a share of the peer's; `lower` says which way is better."""

    name: str
    unit: str
    share: float
    lower: bool = False


GOALS = {
    "decode": Goal("decode, one stream", "tok/s", 2.0),
    "prefill": Goal("cold prefill, 1,800 tokens", "tok/s", 1.5),
    "ttft_cold": Goal("first token, 512 tokens, cold", "ms", 1.0, lower=True),
    "ttft_shared": Goal("first token, 400 of 512 cached", "ms", 0.6, lower=True),
    "ttft_repeat": Goal("first token, exact repeat", "ms", 0.5, lower=True),
    "load_16_shared": Goal("16 x (512 in, 64 out), 400 shared", "tok/s", 1.5),
    "load_16_unique": Goal("16 x (512 in, 64 out), unique", "tok/s", 1.3),
    "load_64_shared": Goal("64 x (512 in, 64 out), 400 shared", "tok/s", 1.4),
    "load_64_unique": Goal("64 x (512 in, 64 out), unique", "tok/s", 1.3),
    "memory": Goal("resident memory beyond 1 GiB of KV", "MB", 0.4, lower=True),
}


class Client:
    """Streams completions of token-id prompts; greedy, end tokens ignored."""

    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self._session = session
        self._random = random.Random(seed)

    def prompt(self, count: int) -> list[int]:
        """Draw a prompt that nobody has seen."""
        return [self._random.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]

    async def stream(
        self, server: Server, prompt: Sequence[int], count: int
    ) -> tuple[float, float]:
        """Return the seconds to the first token and to the last of `count`."""
        body = {
            "model": server.model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        started, first = time.perf_counter(), None
        async with self._session.post(f"{server.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if first is None and line.startswith(b"data: {") and _has_choices(line):
                    first = time.perf_counter() - started
        assert first is not None, "the stream held no token"
        return first, time.perf_counter() - started


def _has_choices(line: bytes) -> bool:
    return bool(json.loads(line[len(b"data: ") :])["choices"])


async def decode(client: Client, server: Server, prompt: list[int]) -> dict[str, float]:
    """Measure 96 tokens of one stream after a short prompt."""
    first, last = await client.stream(server, prompt, 97)
    return {"decode": 96 / (last - first)}


async def first_tokens(client: Client, server: Server, prompt: list[int]) -> dict[str, float]:
    """Measure the first token: cold, after 400 cached tokens, and again."""
    tail = prompt[512:]
    cold, _ = await client.stream(server, prompt[:512], 1)
    shared, _ = await client.stream(server, [*prompt[:400], *tail], 1)
    repeat, _ = await client.stream(server, prompt[:512], 1)
    return {"ttft_cold": cold * 1e3, "ttft_shared": shared * 1e3, "ttft_repeat": repeat * 1e3}


async def prefill(client: Client, server: Server, prompt: list[int]) -> dict[str, float]:
    """Measure a long prompt to its first token."""
    first, _ = await client.stream(server, prompt, 1)
    return {"prefill": len(prompt) / first}


async def burst(
    client: Client, server: Server, prompts: list[list[int]], name: str
) -> dict[str, float]:
    """Measure output tokens per second of prompts sent at once, 64 tokens each."""
    started = time.perf_counter()
    await asyncio.gather(*(client.stream(server, prompt, 64) for prompt in prompts))
    return {name: 64 * len(prompts) / (time.perf_counter() - started)}


async def measure(servers: Sequence[Server], *, quick: bool) -> list[dict[str, float]]:
    """Measure every server in turn, cell by cell; return the medians of each."""
    found: list[dict[str, list[float]]] = [{} for _ in servers]
    timeout = aiohttp.ClientTimeout(total=900)
    # A server that was stopped gives up the connections that it keeps.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        client = Client(session, time.time_ns())
        for server in servers:
            await client.stream(server, client.prompt(32), 4)
        for cell in cells(client, quick=quick):
            for server, figures in zip(servers, found, strict=True):
                with stopped([other for other in servers if other is not server]):
                    for name, value in (await cell(server)).items():
                        figures.setdefault(name, []).append(value)
    return [{name: statistics.median(v) for name, v in figures.items()} for figures in found]


def cells(client: Client, *, quick: bool) -> Iterator[Any]:
    """Yield measurements, each with prompts of its own that every server gets."""
    repeats = 1 if quick else 3
    for _ in range(repeats):
        short, medium, long = client.prompt(32), client.prompt(512 + 112), client.prompt(1800)
        yield lambda server, p=short: decode(client, server, p)
        yield lambda server, p=medium: first_tokens(client, server, p)
        yield lambda server, p=long: prefill(client, server, p)
    for count in (16,) if quick else (16, 64):
        prefix = client.prompt(400)
        shared = [[*prefix, *client.prompt(112)] for _ in range(count)]
        unique = [client.prompt(512) for _ in range(count)]
        yield lambda server, p=shared, n=count: burst(client, server, p, f"load_{n}_shared")
        yield lambda server, p=unique, n=count: burst(client, server, p, f"load_{n}_unique")


@contextlib.contextmanager
def stopped(servers: Sequence[Server]) -> Iterator[None]:
    """Keep servers whose process is known from running meanwhile."""
    pids = [pid for server in servers if server.pid is not None for pid in family(server.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for some in children for child in some for each in family(int(child)))]


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process and all that descend from it."""
    statuses = [Path(f"/proc/{each}/status").read_text() for each in family(pid)]
    lines = [line for status in statuses for line in status.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


@contextlib.contextmanager
def our_engine(dtype: str) -> Iterator[tuple[Server, float]]:
    """Run our engine on the demo model; yield it and the seconds that it took to be ready."""
    port = any_free_port("127.0.0.1")
    command = [sys.executable, "-P", "-m", "router.cli", "engine", "demo", "--port", str(port)]
    command += ["--dtype", dtype, "--kv-cache-memory-bytes", str(_KV_BYTES)]
    command += ["--served-model-name", "demo", "--num-threads", str(num_cores())]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_ready(url, process))
        yield Server(url, "demo", process.pid), time.perf_counter() - started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server says that it is ready; RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + _READY_S
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise RuntimeError("our engine did not become ready")


def row(goal: Goal, ours: float, theirs: float | None) -> Row:
    """Build a row; the goal is a share of the peer's figure, where there is one."""
    if theirs is None:
        return Row(name=goal.name, ours=ours, unit=goal.unit)
    ratio = ours / theirs
    return Row(
        name=goal.name,
        ours=ours,
        unit=goal.unit,
        peer=theirs,
        ratio=ratio,
        goal=f"{'<=' if goal.lower else '>='} {goal.share:g} x",
        met=ratio <= goal.share if goal.lower else ratio >= goal.share,
    )


def main() -> None:
    """Measure and print."""
    parser = flags(__doc__ or "")
    parser.add_argument("--dtype", default="auto", help="precision of ours")
    parser.add_argument("--against", metavar="URL", help="a server that runs already")
    parser.add_argument("--against-model", default="smollm2")
    parser.add_argument("--against-pid", type=int)
    options = parser.parse_args()
    with our_engine(options.dtype):
        pass  # converts the model and compiles, if nobody has
    with our_engine(options.dtype) as (server, start_s):
        servers = [server]
        if options.against:
            servers.append(Server(options.against, options.against_model, options.against_pid))
        results = asyncio.run(measure(servers, quick=options.quick))
        for each, figures in zip(servers, results, strict=True):
            if each.pid is not None:
                figures["memory"] = resident_mb(each.pid) - _KV_BYTES / 1e6
    ours, theirs = results[0], results[1] if len(results) > 1 else {}
    rows = [row(goal, ours[key], theirs.get(key)) for key, goal in GOALS.items() if key in ours]
    rows.append(Row(name="start to ready, second start", ours=start_s, unit="s"))
    report = Report(
        claim="A replica on a CPU is fast and small",
        machine=machine(),
        settings={"dtype": options.dtype, "threads": num_cores(), "model": "SmolLM2-135M"},
        rows=rows,
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()

"""Which router makes most of four replicas' caches: hit rate, time to first token, shed requests.

    python -m benchmarks.bench_fleet [--quick] [--json] [--requests N] [--rate R] [--dilation D]
                                     [--cpu] [--peer NAME=COMMAND ...]

The replicas are ours: real scheduler, pool and KV events, scripted tokens, the step costs of a GPU
made `dilation` times slower, as are the arrivals, so that the machine is not what counts. A run
with less than 30 % idle CPU says nothing: its rows are called void. With `--cpu` there are two
replicas that run the demo model, one thread each, and chat alone: they share the machine with the
router, so nothing is void and figures are those of this machine. COMMAND starts a router, as in
bench_gateway.py; clients of it carry the replicas' own token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks import gateway_fleet as fleet
from benchmarks.demo_folder import demo_folder
from benchmarks.fake_engine import MODEL
from benchmarks.fleet_workloads import STEP_COST, WORKLOADS, Arrival
from benchmarks.timing import Report, Row, machine, show
from engine.frontend.tokenizer_bundle import load_bundle
from kvindex.config import RedisConfig
from router.config import Limits, RouterConfig
from router.launch.children import ReplicaSettings
from sim.traces.percentiles import percentile
from tests.redis_server import running_server, valkey_binary

_TOKEN = "token-of-the-benchmark"
_AMPLE, _SCARCE = 4096, 220
_MIN_IDLE = 0.3
_CPU_RATE, _CPU_REQUESTS = 1.5, 60
_KV_BYTES = 512 * 1024 * 1024
_SETTLE_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What came of one workload before one router."""

    ttfts_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_refused: int = 0
    idle: float = 0.0

    @property
    def hit(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def p95_s(self) -> float:
        """95 % of first tokens came within this time."""
        return percentile(sorted(self.ttfts_s), 0.95) if self.ttfts_s else float("inf")


def scripted(model: Path, *, num_blocks: int, dilation: float) -> dict[str, Any]:
    """Return what makes a replica a scripted one with the step costs of a GPU."""
    return {
        "executor": "scripted",
        "engine": {"max_num_batched_tokens": 2048, "max_step_s": 60.0},
        "scripted": {
            "num_blocks": num_blocks,
            "vocab_size": load_bundle(model).json("config.json")["vocab_size"],
            "first_token": 1000,
            "cost": {name: cost * dilation for name, cost in STEP_COST.items()},
        },
    }


def on_cpu() -> dict[str, Any]:
    """Return what makes a replica run the model."""
    return {"engine": {}, "kv_cache_memory_bytes": _KV_BYTES}


@contextmanager
def replicas(
    folder: Path, redis_url: str, model: Path, *, count: int, kind: dict[str, Any]
) -> Iterator[list[int]]:
    """Run the replicas; yields their ports."""
    with ExitStack() as stack:
        ports = [fleet.free_port() for _ in range(count)]
        for i, port in enumerate(ports):
            settings = ReplicaSettings(
                replica_id=f"replica-{i}",
                host="127.0.0.1",
                port=port,
                model_folder=str(model),
                served_models=(MODEL,),
                dtype="float32",
                num_threads=1,
                internal_token=_TOKEN,
                fleet_secret=fleet.SECRET,
                index_url=redis_url,
                redis=RedisConfig(index_url=redis_url),
                advertised_url=f"http://127.0.0.1:{port}",
                renew_s=2.0,
                lease_s=20.0,
                drain_timeout_s=1.0,
                **kind,
            )
            stack.enter_context(
                fleet.program(
                    folder, f"replica-{i}", "worker.server.main", settings, port=port, key=_TOKEN
                )
            )
        yield ports


def ours(folder: Path, redis_url: str, policy: str) -> AbstractContextManager[fleet.Group]:
    """Run our gateway with one policy."""
    router = RouterConfig(
        port=fleet.free_port(), admin_port=fleet.free_port(), default_policy=policy
    )
    spec = fleet.gateway_spec(router, limits=Limits(), redis_url=redis_url)
    spec = msgspec.structs.replace(spec, internal_token=_TOKEN)
    return fleet.gateway(folder, f"ours, {policy}", spec)


async def empty_caches(ports: list[int]) -> None:
    """Have every replica forget what the router before has warmed, and its router be told."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {_TOKEN}"}) as session:
        for port in ports:
            url = f"http://127.0.0.1:{port}/reset_prefix_cache"
            async with session.post(url, raise_for_status=True) as answer:
                assert (await answer.json())["success"], "a replica is still at work"
    await asyncio.sleep(_SETTLE_S)


async def play(group: fleet.Group, arrivals: list[Arrival], *, rate: float) -> Outcome:
    """Send every chat at its instant, whatever has become of those before."""
    outcome, before = Outcome(), _cpu_ticks()
    headers = {"authorization": f"Bearer {group.key or _TOKEN}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        started_at = time.perf_counter()

        async def send(arrival: Arrival) -> None:
            due_at = started_at + arrival.at_s / rate
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            await _ask(session, group.port, arrival, due_at, outcome)

        await asyncio.gather(*map(send, arrivals))
    idle, total = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
    outcome.idle = idle / max(1, total)
    return outcome


async def _ask(
    session: aiohttp.ClientSession, port: int, arrival: Arrival, due_at: float, outcome: Outcome
) -> None:
    body = {
        "model": MODEL,
        "messages": arrival.messages,
        "max_tokens": arrival.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_at: float | None = None
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            outcome.num_refused += 1
            return
        async for line in answer.content:
            if first_at is None and b'"content":"' in line and b'"content":""' not in line:
                first_at = time.perf_counter()
            if b'"prompt_tokens":' in line:
                usage = msgspec.json.decode(line[6:])["usage"]
                outcome.num_prompt_tokens += usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                outcome.num_cached_tokens += details.get("cached_tokens") or 0
    outcome.ttfts_s.append((first_at or time.perf_counter()) - due_at)


def _cpu_ticks() -> tuple[int, int]:
    """Return idle and all ticks of this machine since it started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


async def run(options: argparse.Namespace) -> list[Row]:
    """Play every workload before every router, with ample and with scarce cache."""
    rows: list[Row] = []
    names = ["chat"] if options.quick or options.cpu else list(WORKLOADS)
    model = options.model or demo_folder()
    for label, kind in _kinds(options, model).items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-fleet-")))
            url = stack.enter_context(running_server(valkey_binary())).url
            ports = stack.enter_context(
                replicas(folder, url, model, count=2 if options.cpu else 4, kind=kind)
            )
            routers = {
                policy: stack.enter_context(ours(folder, url, policy))
                for policy in ("prefix_cost", "round_robin")
            }
            for text in options.peer:
                peer = stack.enter_context(fleet.peer(folder, text, ports, key=_TOKEN))
                routers[peer.name] = peer
            for workload in names:
                outcomes = {}
                for name, group in routers.items():
                    source = random.Random(f"{options.seed} {workload}")
                    arrivals = WORKLOADS[workload](source, options.requests)
                    await empty_caches(ports)
                    rate = options.rate / options.dilation
                    outcomes[name] = await play(group, arrivals, rate=rate)
                rows += compare(
                    f"{workload}, {label}", outcomes, min_idle=0.0 if options.cpu else _MIN_IDLE
                )
    return rows


def _kinds(options: argparse.Namespace, model: Path) -> dict[str, dict[str, Any]]:
    """Return the fleets to measure, by their names."""
    if options.cpu:
        return {"CPU replicas": on_cpu()}
    sizes = {"scarce cache": _SCARCE} | ({} if options.quick else {"ample cache": _AMPLE})
    return {
        label: scripted(model, num_blocks=num_blocks, dilation=options.dilation)
        for label, num_blocks in sizes.items()
    }


def compare(title: str, outcomes: dict[str, Outcome], *, min_idle: float) -> list[Row]:
    """Set our default policy beside the best of the others; round robin of ours is one of them."""
    mine = outcomes["prefix_cost"]
    others = [outcome for name, outcome in outcomes.items() if name != "prefix_cost"]
    best_hit = max(other.hit for other in others)
    best_p95 = min(other.p95_s for other in others)
    void = min(outcome.idle for outcome in outcomes.values()) < min_idle
    title = f"VOID (busy machine): {title}" if void else title
    bound = "ample" not in title and "unique" not in title
    goal = 0.7 if bound else 1.05
    rows = [
        Row(
            name=f"{title}: token hit rate",
            ours=mine.hit,
            unit="",
            peer=best_hit,
            goal=">= best",
            met=None if void else mine.hit >= best_hit,
        ),
        Row(
            name=f"{title}: TTFT p95",
            ours=mine.p95_s,
            unit="s",
            peer=best_p95,
            ratio=mine.p95_s / best_p95,
            goal=f"<= {goal:g} x",
            met=None if void else mine.p95_s <= goal * best_p95,
        ),
    ]
    for name, outcome in outcomes.items():
        figures = f"hit {outcome.hit:.3f}, refused {outcome.num_refused}, idle {outcome.idle:.2f}"
        rows.append(Row(name=f"{title}: {name} ({figures})", ours=outcome.p95_s, unit="s"))
    return rows


def main() -> None:
    """Measure and print."""
    parser = fleet.router_flags(__doc__ or "")
    parser.add_argument("--cpu", action="store_true", help="two replicas that run the demo model")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, help="requests/s, before dilation")
    parser.add_argument("--dilation", type=float)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.requests = options.requests or (_CPU_REQUESTS if options.cpu else 240)
    options.rate = options.rate or (_CPU_RATE if options.cpu else 40.0)
    options.dilation = options.dilation or (1.0 if options.cpu else 10.0)
    if options.quick:
        options.requests = min(options.requests, 60)
    report = Report(
        claim="Exact placement finds more in the fleet's caches",
        machine=machine(),
        settings={
            "replicas": "2, CPU" if options.cpu else "4, scripted",
            "dilation": options.dilation,
            "rate": options.rate,
        },
        rows=uvloop.run(run(options)),
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()

"""What a recording holds: a trace that the simulator reads, and nothing to guess a prompt from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme, hash_tokens
from router.config import Limits, RecordConfig, TenantConfig
from router.observe.recorder import Recorded, Recorder
from sim.traces.trace import open_trace
from tests.conditions import until
from tests.router.fake_replica import Behaviour
from tests.router.running_gateway import (
    GLOBEX_KEY,
    TENANTS,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

PROMPT = list(range(40))


def request(prompt: list[int], arrived_at: float = 0.0, **fields: Any) -> Recorded:
    known: dict[str, Any] = {
        "arrived_at": arrived_at,
        "prompts": [prompt],
        "num_prompt_tokens": len(prompt),
        "num_output_tokens": 3,
        "block_size": 16,
        "tenant": "acme",
        "model": "tiny",
        "priority": 0,
        "group": "tenant/acme",
        "client_salt": None,
        "session": None,
        "outcome": "answered",
    }
    return Recorded(**(known | fields))


def record(path: Path, *requests: Recorded, max_bytes: int = 1 << 20) -> Recorder:
    recorder = Recorder(path, max_bytes=max_bytes, now=0.0)
    for one in requests:
        recorder.end(recorder.arrived(), one)
    recorder.close()
    return recorder


async def test_a_gateways_recording_is_read_by_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    few = TenantConfig(
        name="globex", keys=TENANTS[1].keys, limits=Limits(requests_per_minute=1), isolation="duo"
    )
    spec = gateway_spec(tenants=(TENANTS[0], few), record=RecordConfig(path=str(file)))
    async with running_gateway(spec) as running:
        await running.post("/v1/completions", completion(PROMPT, prompt_cache_key="s"))
        await running.post("/v1/completions", completion([*PROMPT, 7], cache_salt="own"))
        for _ in range(2):
            await running.post("/v1/completions", completion(PROMPT), key=GLOBEX_KEY)
        await running.post("/v1/completions", completion([PROMPT, [9] * 20]))
        await running.post("/v1/completions", b"{")
    trace = open_trace(file)
    assert (trace.header.block_size, trace.header.time_unit, trace.header.source) == (
        16,
        "s",
        "gateway",
    )
    rows = list(trace.rows())
    assert [(row.tenant, row.group, row.outcome) for row in rows] == [
        ("acme", "tenant/acme", "answered"),
        ("acme", "tenant/acme", "answered"),
        ("globex", "group/duo", "answered"),
        ("globex", "group/duo", "refused"),
        ("acme", "tenant/acme", "answered"),
        ("acme", "tenant/acme", "answered"),
    ]
    assert [row.input_length for row in rows] == [40, 41, 40, 40, 40, 20]
    assert [row.output_length for row in rows[:4]] == [3, 3, 3, 0]
    # The chain is that of the bare prompt: what an isolation cuts apart is together here.
    assert len({row.hash_ids for row in rows[:5]}) == 1
    assert [row.client_salt is None for row in rows] == [True, False, True, True, True, True]
    assert [row.session_id is None for row in rows] == [False, True, True, True, True, True]


async def test_rows_are_in_order_of_arrival_whoever_ends_first(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    spec = gateway_spec(
        default_policy="round_robin", record=RecordConfig(path=str(file)), queue=None
    )
    async with running_gateway(spec) as running:
        hold = asyncio.Event()
        running.replicas[0].behaviour = running.replicas[1].behaviour = Behaviour(hold=hold)
        slow = asyncio.create_task(running.post("/v1/completions", completion([1] * 16)))
        await until(lambda: sum(r.num_running for r in running.replicas) == 1)
        for replica in running.replicas:
            if not replica.num_running:
                replica.behaviour = Behaviour()
        await running.post("/v1/completions", completion([2] * 32))
        gone = asyncio.create_task(running.post("/v1/chat/completions", chat("x")))
        await until(lambda: sum(r.num_running for r in running.replicas) == 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        hold.set()
        await slow
        await running.nothing_runs()
    rows = list(open_trace(file).rows())
    assert [row.input_length for row in rows[:2]] == [16, 32]
    assert [row.outcome for row in rows] == ["answered", "answered", "cancelled"]


def test_no_text_and_no_hash_that_a_guess_could_be_tested_against(tmp_path: Path) -> None:
    for name in ("one", "two"):
        record(tmp_path / name, request(PROMPT, client_salt="salt", session="session"))
    one, two = (
        json.loads((tmp_path / name).read_text().splitlines()[1]) for name in ("one", "two")
    )
    assert one["hash_ids"] != two["hash_ids"]
    assert len(one["hash_ids"]) == len(two["hash_ids"]) == 2
    for digest in hash_tokens(PROMPT, HashScheme()):
        assert int.from_bytes(digest[:8], "big") >> 1 not in one["hash_ids"]
    assert "session" not in one["session_id"]
    assert one["client_salt"] != two["client_salt"]


def test_models_share_no_blocks(tmp_path: Path) -> None:
    record(tmp_path / "t", request(PROMPT), request(PROMPT, model="other"))
    first, second = list(open_trace(tmp_path / "t").rows())
    assert not set(first.hash_ids or ()) & set(second.hash_ids or ())


def test_a_recording_ends_at_its_size_and_never_overwrites_an_older_one(tmp_path: Path) -> None:
    many = [request(PROMPT, float(i)) for i in range(100)]
    recorder = record(tmp_path / "t.jsonl", *many, max_bytes=2000)
    assert 5 < recorder.num_rows < 100
    assert recorder.num_rows + recorder.num_dropped == 100
    record(tmp_path / "t.jsonl", request(PROMPT))
    assert len((tmp_path / "t-1.jsonl").read_text().splitlines()) == 2
    assert len(list(open_trace(tmp_path / "t.jsonl").rows())) == recorder.num_rows


def test_a_path_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.record\.path: .*/none/t: No such file"):
        Recorder(tmp_path / "none" / "t", max_bytes=1, now=0.0)

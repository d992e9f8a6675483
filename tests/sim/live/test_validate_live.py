"""Replays of a live scripted fleet: real gateway, replicas and index, the same decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.fleet_process import FleetProcess
from tests.sim.live.conftest import (
    CONVERSATION,
    SYNTHETIC,
    first_rows,
    growing_sessions,
    scripted_fleet,
    validated,
    written,
)

pytestmark = pytest.mark.slow

NUM_BLOCKS = 1025
TENANTS = [
    {"name": "default"},
    {"name": "two", "policy": "power_of_two"},
    {"name": "sticky", "policy": "session"},
]
"""The policies of the last two depend on the names of requests and replicas."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    """Two replicas of 1,024 blocks whose steps cost nothing."""
    folder, scripted = tmp_path_factory.mktemp("fleet"), {"num_blocks": NUM_BLOCKS}
    with scripted_fleet(folder, tiny_model, scripted=scripted, tenants=TENANTS) as running:
        yield running


@pytest.mark.parametrize(
    ("trace", "count"), [(CONVERSATION, 200), (SYNTHETIC, 80)], ids=["conversation", "synthetic"]
)
def test_one_by_one_every_request_goes_where_the_replay_says_and_finds_as_much_cached(
    fleet: FleetProcess, trace: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = validated(capsys, fleet, trace, "--shrink", "32", "--limit", str(count))
    found = report["comparison"]
    assert found["first_difference"] is None
    assert (found["equal_cached"], found["equal_replica"]) == (count, count)
    assert found["hit_rate_live"] == found["hit_rate_replay"] > 0
    assert report["blocks"] == NUM_BLOCKS - 1  # as the gateway said, less than the prompts need
    assert (code, found["exceeded"]) == (0, [])


@pytest.mark.parametrize("tenant", [tenant["name"] for tenant in TENANTS])
def test_sessions_that_grow_are_followed_turn_by_turn_under_every_policy(
    fleet: FleetProcess, tenant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace.jsonl", growing_sessions(sessions=6, turns=5))
    code, report = validated(capsys, fleet, trace, "--key", fleet.key(tenant))
    found = report["comparison"]
    assert found["first_difference"] is None
    assert (code, found["equal_cached"], found["equal_replica"]) == (0, 30, 30)
    assert report["policy"] == {"default": "prefix_cost", "two": "power_of_two"}.get(
        tenant, "session"
    )


def test_a_replay_of_another_fleet_fails_and_names_the_first_request_that_differs(
    fleet: FleetProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace.jsonl", growing_sessions(sessions=6, turns=3))
    code, report = validated(capsys, fleet, trace, "--blocks", "32")
    found = report["comparison"]
    first = found["first_difference"]
    assert code == 1
    assert found["exceeded"][0].startswith("cached tokens equal for ")
    why = re.fullmatch(
        r"replica-\d/0: num_cached_tokens was (\d+) live, (\d+) in the replay", first["why"]
    )
    assert why is not None
    assert int(why[1]) > int(why[2])  # A replica of 32 blocks has evicted some by then.
    assert len(first["live"]["candidates"]) == len(first["replay"]["candidates"]) == 2


def test_by_the_clock_the_hit_rate_is_within_a_point_and_the_choices_agree(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace's requests come in ticks of 3 s; steps are long against what a machine delays.

    Beside nothing else the choices agree in 99 % and more; a busy machine turns some around.
    """
    cost = {"base_s": 0.1, "per_prefill_token_s": 0.0001, "per_decode_s": 0.001}
    header, rows = first_rows(CONVERSATION, 160)
    rows = [msgspec.structs.replace(row, output_length=2) for row in rows]
    trace = written(tmp_path / "trace.jsonl", (header, rows))
    latency = tmp_path / "latency.json"
    latency.write_bytes(msgspec.json.encode({"name": "stated", **cost}))
    with scripted_fleet(
        tmp_path / "fleet",
        tiny_model,
        scripted={"num_blocks": 4097, "cost": cost},
        engine={"max_num_batched_tokens": 8192, "max_step_s": 0.0},
    ) as running:
        code, report = validated(
            capsys,
            running,
            trace,
            *("--open-loop", "--speed-up", "2", "--latency", str(latency)),
            *("--tolerance", "replica=0.75", "--tolerance", "hit=3", "--tolerance", "cached=0.75"),
        )
    found = report["comparison"]
    assert (code, found["exceeded"]) == (0, []), found["first_difference"]
    assert found["answered_live"] == found["answered_replay"] == len(rows)

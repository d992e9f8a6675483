"""What a gateway records is enough to decide again as it did."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvindex.index import Target
from router.policy.types import Candidate, Place
from sim.live.client import connected
from sim.live.compare import ONE_BY_ONE, Tolerance, compare
from sim.live.drive import Driven, Driver, empty_caches
from sim.live.fleet_settings import FleetAddress, find_fleet, read_settings
from sim.live.prompts import PromptMaker
from sim.live.twin import replay_driven, targets_weighed
from sim.live.validation import Plan, replay_config
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import open_trace
from tests.sim.live.conftest import SYNTHETIC, first_rows, scripted_fleet

NUM_REQUESTS = 60
PLAN = Plan(vocab_size=127, latency="h100-8b", tolerance=Tolerance())


async def served(
    address: FleetAddress, header: TraceHeader, rows: list[TraceRow]
) -> tuple[str, list[Driven]]:
    """Send rows one by one: the gateway's id, what came back."""
    async with connected(address) as client:
        await empty_caches(client, "tiny")
        prompts = PromptMaker(header, vocab_size=127)
        driver = Driver(client, prompts, model="tiny", done=lambda: None)
        return (await client.fleet()).gateway, await driver.one_by_one(rows)


def by_target(candidate: Candidate) -> Target:
    return candidate.target


@pytest.mark.slow
@pytest.mark.fault("router-59")
def test_a_recording_replayed_in_the_same_order_gives_the_same_decisions(
    tmp_path: Path, tiny_model: Path
) -> None:
    recording = tmp_path / "recording.jsonl"
    header, rows = first_rows(SYNTHETIC, NUM_REQUESTS)
    with scripted_fleet(
        tmp_path / "fleet",
        tiny_model,
        scripted={"num_blocks": 513},
        router={"record": {"path": str(recording)}},
    ) as fleet:
        settings = read_settings(fleet.config_file)
        address = find_fleet(fleet.run_dir, url=None, key=None, admin_url=None, admin_key=None)
        gateway, driven = asyncio.run(served(address, header, rows))
    trace = open_trace(recording)
    recorded = [
        msgspec.structs.replace(one, row=row) for one, row in zip(driven, trace.rows(), strict=True)
    ]
    targets = targets_weighed(driven)
    config = replay_config(settings, PLAN, recorded, replicas=len(targets), blocks=512)
    twin = replay_driven(trace.header, recorded, config, gateway=gateway, targets=targets)
    assert compare(twin, ONE_BY_ONE).exceeded == ()
    assert len(twin.driven) == NUM_REQUESTS
    for number, one in enumerate(twin.driven):
        assert one.record is not None
        again, live = twin.decisions[number], one.record.attempts[0].decision
        assert isinstance(again, Place)
        assert isinstance(live, Place)
        # What every replica held and had to do, its score, and the winner.
        assert sorted(again.candidates, key=by_target) == sorted(live.candidates, key=by_target)
        assert (again.winner, again.rule) == (live.winner, live.rule)
    assert {one.received.replica for one in driven} == {"replica-0", "replica-1"}

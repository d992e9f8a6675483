"""Replays what was just sent to a live fleet: the same rows, times, names and settings.

It turns what was driven into a replay and runs it; nothing here speaks HTTP or compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvindex.index import Target
from router.policy.planner import Planner
from router.policy.registry import build_policy
from router.policy.types import Candidate, Decision
from sim.clocked import ClockedReplay
from sim.config import ReplayConfig
from sim.latency import load_latency
from sim.live.drive import Driven
from sim.live.live_router import LiveRouter
from sim.outcomes import Outcomes
from sim.routers import PlannedRouter, PolicyTable
from sim.routing import targets_of
from sim.traces.row import TraceHeader, TraceRow
from sim.workload import Workload

_TOGETHER_S = 0.05


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """A replay of live requests in the order of `driven`, the order of the gateway's first plans.

    `replicas` names the live ones by position; decisions are by number of the request.
    """

    driven: tuple[Driven, ...]
    outcomes: Outcomes
    replicas: tuple[str, ...]
    decisions: Mapping[int, Decision]


def replay_driven(
    header: TraceHeader,
    driven: Sequence[Driven],
    config: ReplayConfig,
    *,
    gateway: str,
    targets: Sequence[Target],
) -> Twin:
    """Replay the requests that were sent, with the speeds that the gateway went by.

    `targets` are the live ones, as many as the configuration has replicas.
    """
    timed = _by_first_plan(driven)
    ordered = tuple(one for _, one in timed)
    rows = _rows(timed)
    live = dict(zip(targets_of(config), targets, strict=True))
    recorded = _recorded(ordered)
    policy = build_policy(config.policy, config.params, owner="the live fleet")
    planner = Planner(PolicyTable(policy, {}), config=config.planner, gateway=gateway)
    router = LiveRouter(PlannedRouter(planner), live, recorded)
    router.remember(recorded.get(0, ()))
    workload = Workload(header, lambda: rows, config)
    latency = load_latency(config.latency)
    replay = ClockedReplay(config, workload, latency, make_router=lambda _: router)
    outcomes = replay.run()
    return Twin(
        driven=ordered,
        outcomes=outcomes,
        replicas=tuple(target.replica for target in live.values()),
        decisions=router.decided,
    )


def _by_first_plan(driven: Sequence[Driven]) -> list[tuple[float, Driven]]:
    """Return the requests in the order in which the gateway first planned each, and when.

    Whoever did not wait was placed then. Whoever waited is planned when it came, but not before
    those that came with it or earlier and were placed at once: its wait is the replay's to find.
    Instants are those of sending where one record is missing.
    """
    planned = _in_plan_order(driven)
    records = [one.record for one in planned if one.record is not None]
    if len(records) < len(planned):
        return [(one.received.sent_at, one) for one in planned]
    at_once = [record for record in records if not record.has_waited]
    latest = -math.inf
    keyed: list[tuple[float, int, Driven]] = []
    for position, (record, one) in enumerate(zip(records, planned, strict=True)):
        if record.has_waited:
            border = record.came_at + _TOGETHER_S
            before = (other.placed_at for other in at_once if other.came_at <= border)
            keyed.append((max([record.came_at, *before]), position, one))
        else:
            latest = max(latest, record.placed_at)
            keyed.append((latest, position, one))
    return [(at, one) for at, _, one in sorted(keyed, key=lambda entry: entry[:2])]


def _in_plan_order(driven: Sequence[Driven]) -> tuple[Driven, ...]:
    """Order requests as the gateway placed them: by how many it had placed before each.

    One whose decision is not known stays behind the one that was sent before it.
    """
    before = 0
    keyed: list[tuple[int, int, Driven]] = []
    for position, one in enumerate(sorted(driven, key=lambda one: one.received.sent_at)):
        candidates = one.candidates
        if candidates:
            before = max(candidate.last_placed for candidate in candidates)
        keyed.append((before, position, one))
    return tuple(one for _, _, one in sorted(keyed, key=lambda entry: entry[:2]))


def _rows(timed: Sequence[tuple[float, Driven]]) -> list[TraceRow]:
    """Return the rows as they were really served: instants, ids, tenant, priority.

    Of what the trace says beyond that nothing was sent: answers are the fleet's own.
    """
    rows: list[TraceRow] = []
    for instant, one in timed:
        record = one.record
        asked = record.attempts[0].request if record is not None and record.attempts else None
        since_first_s = max(0.0, instant - timed[0][0])
        rows.append(
            msgspec.structs.replace(
                one.row,
                arrival_s=max(since_first_s, rows[-1].arrival_s) if rows else 0.0,
                request_id=record.unique_id if record is not None else None,
                tenant=record.tenant if record is not None else None,
                priority=asked.priority if asked is not None else one.row.priority,
                delay_s=None,
                output_hash_ids=None,
                group=None,
                client_salt=None,
            )
        )
    return rows


def targets_weighed(driven: Sequence[Driven]) -> list[Target]:
    """Return every target that was a candidate, in order; none where no decision is known."""
    return sorted({candidate.target for one in driven for candidate in one.candidates})


def _recorded(ordered: Sequence[Driven]) -> dict[int, Sequence[Candidate]]:
    return {number: one.candidates for number, one in enumerate(ordered) if one.candidates}

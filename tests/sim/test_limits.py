"""Limits of tenants in a replay: the gateway's rules, and who gets how many 429s."""

from __future__ import annotations

import pytest

from kvindex.foundation.errors import ConfigError
from router.config import Limits
from sim.config import ReplayConfig, TenantTraffic
from sim.outcomes import Outcomes
from sim.replay import report_replay
from sim.report.sentences import sentences
from sim.report.summary import ReplayReport
from sim.traces.row import TraceRow
from tests.sim.replaying import HEADER, config, play, row


def requests(count: int, *, every_s: float, tenant: str = "b") -> list[TraceRow]:
    return [row(i + 1, i * every_s, [i], tenant=tenant) for i in range(count)]


def limited(limits: Limits) -> dict[str, TenantTraffic]:
    return {"b": TenantTraffic(limits=limits)}


def refused_lines(outcomes: Outcomes) -> list[int]:
    assert {refusal.why for refusal in outcomes.refused} <= {"limited"}
    return [refusal.line for refusal in outcomes.refused]


def test_requests_per_minute_refuse_what_comes_within_the_window() -> None:
    # At 0, 10, …, 110 s; what was claimed at second s leaves the window at s + 61.
    rows = requests(12, every_s=10.0)
    outcomes = play(rows, mode="open", tenants=limited(Limits(requests_per_minute=3)))
    assert refused_lines(outcomes) == [4, 5, 6, 7, 11, 12]


def test_requests_at_a_time_are_counted_until_the_answer_has_ended() -> None:
    rows = [*requests(3, every_s=0.0), row(4, 500.0, [9], tenant="b")]
    outcomes = play(rows, mode="open", tenants=limited(Limits(max_parallel=2)))
    assert refused_lines(outcomes) == [3]
    assert len(outcomes.answers) == 3


def test_a_claim_is_corrected_by_what_was_used() -> None:
    # A first claim is 17 prompt tokens and the guess of 256; 17 + 4 are charged in the end.
    rows = requests(2, every_s=30.0)
    enough = play(rows, mode="open", tenants=limited(Limits(tokens_per_minute=17 + 256)))
    assert refused_lines(enough) == []
    too_few = play(rows, mode="open", tenants=limited(Limits(tokens_per_minute=17 + 255)))
    assert refused_lines(too_few) == [1, 2]


def test_cached_tokens_are_charged_at_a_tenth() -> None:
    rows = [row(i + 1, 30.0 * i, [1, 2, 3], tenant="b") for i in range(3)]
    # Charged: 49 + 4, then 1 + ceil(4.8) + 4 = 10; the third claims 49 + 4.
    budget = Limits(tokens_per_day=53 + 10 + 53)
    assert refused_lines(play(rows, mode="open", replicas=1, tenants=limited(budget))) == [1, 2, 3]
    budget = Limits(tokens_per_day=49 + 256)
    assert refused_lines(play(rows, mode="open", replicas=1, tenants=limited(budget))) == []


def test_other_tenants_are_not_limited_and_the_report_says_who_was() -> None:
    rows = sorted(
        requests(5, every_s=1.0) + [row(10 + i, 1.0 * i, [50 + i], tenant="a") for i in range(5)],
        key=lambda r: r.arrival_s,
    )
    report = reported(rows, Limits(requests_per_minute=2))
    assert (report.limited, report.shed, report.refused) == (3, 0, 0)
    assert {name: t.limited for name, t in report.tenants.items()} == {"a": 0, "b": 3}
    text = sentences(report)
    assert "3 requests (30.0%) exceeded their tenant's limits and got a 429." in text
    assert "Who was refused by limits: b 3." in text


def test_a_replay_without_a_clock_refuses_limits() -> None:
    with pytest.raises(ConfigError, match="a limit of a tenant needs a clock: give --mode open"):
        play(requests(1, every_s=1.0), tenants=limited(Limits(max_parallel=1)))


def reported(rows: list[TraceRow], limits: Limits) -> ReplayReport:
    settings: ReplayConfig = config(mode="open", tenants=limited(limits))
    return report_replay(HEADER, lambda: rows, settings, bounds=None)

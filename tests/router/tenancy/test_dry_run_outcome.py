"""What a dry run says in words: what changes, what stays, and what limits the comparison."""

from __future__ import annotations

from typing import Any

from router.tenancy.dry_run_outcome import Outcome, caveats, changes


def outcome(policy: str = "round_robin", **fields: Any) -> Outcome:
    known: dict[str, Any] = {
        "policy": policy,
        "params": {},
        "token_hit": 0.25,
        "ttft_p50_s": 0.25,
        "ttft_p99_s": 2.0,
        "shed": 0,
        "fleet_token_hit": 0.125,
        "fleet_ttft_p99_s": 2.5,
        "busiest_share": 0.5,
    }
    return Outcome(**(known | fields))


def test_every_change_is_one_sentence() -> None:
    then = outcome(
        "prefix_cost",
        token_hit=0.5,
        ttft_p50_s=0.125,
        ttft_p99_s=1.5,
        shed=1200,
        fleet_token_hit=0.375,
        busiest_share=0.375,
    )
    assert changes(outcome(), then, num_replicas=4) == [
        "50.0 % of the tenant's prompt tokens would come from a cache instead of 25.0 %.",
        "Over all tenants it would be 37.5 % of prompt tokens instead of 12.5 %.",
        "Half of its first tokens would come within 125 ms instead of 250 ms, 99 % within 1.50 s "
        "instead of 2.00 s.",
        "The busiest of 4 replicas would compute 37.5 % of all prompt tokens instead of 50.0 %; "
        "even would be 25.0 %.",
        "1,200 of its requests would be shed instead of 0.",
    ]


def test_what_stays_is_said_to_stay() -> None:
    assert changes(outcome(shed=3), outcome("session", shed=3), num_replicas=1) == [
        "25.0 % of the tenant's prompt tokens would come from a cache as now.",
        "Half of its first tokens would come within 250 ms as now, 99 % within 2.00 s as now.",
        "3 of its requests would be shed as now.",
    ]


def test_what_is_not_known_is_not_said() -> None:
    unknown = {"token_hit": None, "ttft_p50_s": None, "busiest_share": None}
    then = outcome("session", **unknown)
    assert changes(outcome(), then, num_replicas=4) == [
        "The recording has lengths only: the hit rate is unknown."
    ]


def test_the_policy_in_force_changes_nothing() -> None:
    assert changes(outcome(), outcome(), num_replicas=4) == [
        "The tenant is placed by round_robin with these parameters already."
    ]


def test_small_recordings_and_simulated_times_are_said() -> None:
    assert caveats(99, latency="h100-8b") == [
        "Only 99 requests of the tenant are recorded: too few to decide.",
        "Times are by the profile h100-8b: compare them with each other, not a clock.",
    ]
    assert len(caveats(100, latency="h100-8b")) == 1

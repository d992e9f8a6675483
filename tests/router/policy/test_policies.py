"""What each policy prefers, on the placements that routers of this kind have got wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from kvindex.foundation.errors import ConfigError
from kvindex.index import LoadReport, Reservation, Target
from kvindex.memory_index import MemoryIndex
from router.policy.registry import build_policy
from router.policy.types import Place
from tests.router.policy.build import ask, planner, view, views, winner


def test_round_robin_takes_turns_whatever_the_cache_says() -> None:
    plan = planner("round_robin")
    targets = [view("a", matched_blocks=10), view("b"), view("c")]
    chosen = [winner(plan.plan(ask(str(i)), targets, 0.0)) for i in range(6)]
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[:3] == chosen[3:]


def test_least_load_counts_queued_prefill_too() -> None:
    targets = [view("a", num_reserved=1, reserved_prefill_tokens=4096), view("b", num_reserved=3)]
    assert winner(planner("least_load").plan(ask(), targets, 0.0)) == "b"


@pytest.mark.fault("router-25")
def test_a_small_full_match_pulls_less_than_a_large_part() -> None:
    short, long = ask("s", num_tokens=17), ask("l", num_tokens=120 * 16)
    busy = {"reserved_prefill_tokens": 200}
    one_block = [view("a", matched_blocks=1, **busy), view("b")]
    assert winner(planner().plan(short, one_block, 0.0)) == "b"
    hundred_blocks = [view("a", matched_blocks=100, **busy), view("b")]
    assert winner(planner().plan(long, hundred_blocks, 0.0)) == "a"


@pytest.mark.fault("router-27")
def test_imbalance_elsewhere_does_not_discard_affinity() -> None:
    targets = [
        view("a", matched_blocks=10, num_reserved=70, reserved_prefill_tokens=7000),
        view("b", matched_blocks=6),
        view("c", matched_blocks=4),
        view("d"),
    ]
    assert winner(planner().plan(ask(), targets, 0.0)) == "b"


@pytest.mark.fault("router-28")
def test_a_gain_smaller_than_the_queue_is_not_waited_for() -> None:
    targets = [view("a", matched_blocks=2, reserved_prefill_tokens=2000), view("b")]
    assert winner(planner().plan(ask(num_tokens=100), targets, 0.0)) == "b"


@pytest.mark.fault("router-28")
def test_without_sharing_it_spreads_as_evenly_as_round_robin() -> None:
    placed = {}
    for policy in ("round_robin", "prefix_cost"):
        plan = planner(policy)
        targets = views("a", "b", "c", "d")
        chosen = Counter(winner(plan.plan(ask(str(i), 64), targets, 0.0)) for i in range(40))
        placed[policy] = sorted(chosen.values())
    assert placed["prefix_cost"] == placed["round_robin"] == [10, 10, 10, 10]


@pytest.mark.fault("router-22")
def test_every_second_turn_returns_to_where_the_first_was_served() -> None:
    plan = planner()
    names = ["a", "b", "c", "d"]
    homes = {}
    for chat in range(20):
        homes[chat] = winner(plan.plan(ask(str(chat), 64), views(*names), 0.0))
        plan.finish(str(chat), 1, "answered", 0.0)
    assert Counter(homes.values()) == dict.fromkeys(names, 5)
    for chat, home in homes.items():
        warm = [view(name, matched_blocks=4 if name == home else 0) for name in names]
        assert winner(plan.plan(ask(f"{chat}-2", 100), warm, 0.0)) == home
        plan.finish(f"{chat}-2", 1, "answered", 0.0)


@pytest.mark.fault("router-24")
def test_siblings_of_a_running_cold_prefill_follow_it() -> None:
    plan = planner()
    prefix = tuple(f"p{i}".encode() for i in range(128))
    chosen = []
    for i in range(8):
        tail = (f"tail{i}".encode(),)
        request = ask(str(i), 129 * 16 + 1, hashes=prefix + tail)
        place = plan.plan(request, views("a", "b", "c", "d"), 0.0)
        assert isinstance(place, Place)
        chosen.append((place.winner.target.replica, place.winner.num_reusable_tokens))
    assert len({name for name, _ in chosen}) == 1
    assert [tokens for _, tokens in chosen] == [0, *([2048] * 7)]


@pytest.mark.fault("router-24")
def test_siblings_sent_by_another_gateway_are_followed_too() -> None:
    # Another gateway has reserved the same 128 blocks at `a`, and nothing is written yet.
    targets = [view("a", pending_blocks=128, reserved_prefill_tokens=2065), view("b")]
    place = planner().plan(ask(num_tokens=129 * 16 + 1), targets, 0.0)
    assert isinstance(place, Place)
    assert winner(place) == "a"
    assert (place.winner.num_cached_tokens, place.winner.num_reusable_tokens) == (0, 2048)


@pytest.mark.fault("router-21")
def test_a_hot_prefix_does_not_draw_all_traffic_to_one_replica() -> None:
    plan = planner()
    names = [f"r{i}" for i in range(8)]
    held = {"r0": 128}
    shared = tuple(f"system:{i}".encode() for i in range(128))
    running: list[str] = []
    chosen: Counter[str] = Counter()
    for i in range(800):
        if len(running) == 256:  # In steady state the oldest request ends when one arrives.
            plan.finish(running.pop(0), 1, "answered", 0.0)
        targets = [view(name, matched_blocks=held.get(name, 0)) for name in names]
        own = tuple(f"{i}:{block}".encode() for block in range(8))
        request = ask(str(i), 136 * 16, hashes=shared + own)
        name = winner(plan.plan(request, targets, 0.0))
        plan.first_token(str(i), 1)
        held[name] = 128
        running.append(str(i))
        chosen[name] += 1
    assert set(held) == set(names)
    assert max(chosen.values()) <= 160  # 20 % of the traffic, where an even share is 12.5 %


def test_a_conversation_stays_where_it_is_although_another_target_is_free() -> None:
    """Recomputing 1,600 tokens takes 1.6 s; its target is 6 s behind, and later turns count."""
    there = view("a", matched_blocks=100, reserved_prefill_tokens=6000)
    turn = ask(num_tokens=1700)
    assert winner(planner().plan(turn, [there, view("b")], 0.0)) == "a"
    behind = view("a", matched_blocks=100, reserved_prefill_tokens=20_000)
    assert winner(planner().plan(turn, [behind, view("b")], 0.0)) == "b"


def test_what_several_conversations_begin_with_is_no_reason_to_stay() -> None:
    plan = planner()
    shared = tuple(f"system:{i}".encode() for i in range(100))
    warm = view("a", matched_blocks=100)
    busy = view("a", matched_blocks=100, reserved_prefill_tokens=6000)
    for i in range(8):
        request = ask(f"r{i}", 1700, hashes=(*shared, f"own {i}".encode()))
        assert winner(plan.plan(request, [warm], 0.0)) == "a"
    last = ask("last", 1700, hashes=(*shared, b"own"))
    assert winner(plan.plan(last, [busy, view("b")], 0.0)) == "b"


@pytest.mark.fault("router-26")
def test_a_restarted_empty_replica_gets_no_more_than_its_share() -> None:
    plan = planner()
    names = ["a", "b", "c", "d"]
    plan.forget(["d"])
    chosen: Counter[str] = Counter()
    for i in range(1000):
        chosen[winner(plan.plan(ask(str(i), 500), views(*names), 0.0))] += 1
        plan.first_token(str(i), 1)
        plan.finish(str(i), 1, "answered", 0.0)
    assert max(chosen.values()) <= 255


@pytest.mark.fault("router-23")
def test_a_burst_over_sixteen_gateways_spreads_through_the_shared_reservations() -> None:
    index = MemoryIndex()
    names = ["a", "b", "c", "d"]
    for name in names:
        epoch = index.register(Target(name), boot_ns=1, lease_s=60.0)
        index.renew(Target(name), epoch, lease_s=60.0, report=LoadReport(mode="EXACT"))
    chosen: Counter[str] = Counter()
    for i in range(16):
        gateway = f"gw-{i}"
        index.touch_gateway(gateway, lease_s=60.0)
        seen = [
            view(
                match.target.replica,
                reserved_prefill_tokens=match.reserved_prefill_tokens,
                num_reserved=match.num_reserved,
            )
            for match in index.match([])
        ]
        place = planner(gateway=gateway).plan(ask(str(i)), seen, 0.0)
        assert isinstance(place, Place)
        chosen[winner(place)] += 1
        index.reserve(
            Reservation(
                request_id=str(i),
                attempt=1,
                target=place.winner.target,
                gateway=gateway,
                prefill_tokens=place.winner.num_uncached_tokens,
                num_blocks=11,
            )
        )
    assert chosen == dict.fromkeys(names, 4)


@pytest.mark.fault("router-23")
def test_gateways_that_know_nothing_of_each_other_do_not_all_start_with_the_same_replica() -> None:
    names = [f"r{i}" for i in range(8)]
    first = Counter(
        winner(planner(gateway=f"gw-{i}").plan(ask(), views(*names), 0.0)) for i in range(64)
    )
    assert len(first) == 8
    assert max(first.values()) <= 16


def test_policies_and_parameters_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.acme: no policy 'fastest'; there are least"):
        build_policy("fastest", {}, owner="tenants.acme")
    with pytest.raises(ConfigError, match=r"prefix_cost: .*unknown field `speed`; it takes: work_"):
        build_policy("prefix_cost", {"speed": 1.0}, owner="tenants.acme")
    with pytest.raises(ConfigError, match=r"least_load: Expected `float` > 0"):
        build_policy("least_load", {"tokens_per_request": 0.0}, owner="tenants.acme")


def test_rates_that_say_more_of_the_last_prompts_than_of_the_target_move_nobody() -> None:
    """Short prompts were computed at 1,300 tokens/s by one, long ones at 6,000 by its equal."""
    turn = ask(num_tokens=400)
    there = view("a", matched_blocks=20, prefill_tokens_per_s=1300.0, num_reserved=1)
    assert winner(planner().plan(turn, [there, view("b", prefill_tokens_per_s=6000.0)], 0.0)) == "a"


def test_a_target_that_is_clearly_slower_is_charged_for_it() -> None:
    slow, fast = view("a", prefill_tokens_per_s=1000.0), view("b", prefill_tokens_per_s=6000.0)
    waits = {"num_reserved": 1, "reserved_prefill_tokens": 100}
    assert winner(planner().plan(ask(num_tokens=400), [slow, fast], 0.0)) == "b"
    busy = view("b", prefill_tokens_per_s=6000.0, **waits)
    assert winner(planner().plan(ask(num_tokens=400), [slow, busy], 0.0)) == "b"
    unknown = view("c", prefill_tokens_per_s=None)
    assert winner(planner().plan(ask(num_tokens=400), [slow, unknown, busy], 0.0)) == "c"

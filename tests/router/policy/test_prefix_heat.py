"""What several conversations begin with, told from what one conversation goes on with."""

from __future__ import annotations

from router.policy.planner import Planner, PlannerConfig
from router.policy.prefix_heat import MAX_PREFIXES, PrefixHeat
from router.policy.queueing import QueueConfig
from router.policy.registry import build_policy
from router.policy.types import Place, PlanRequest, Wait
from tests.router.policy.build import ask, planner, view

SYSTEM = tuple(f"system:{i}".encode() for i in range(40))


def turn(chat: str, number: int) -> PlanRequest:
    """Return a turn of a conversation; each is 5 blocks longer than the one before."""
    own = tuple(f"{chat}:{i}".encode() for i in range(5 * number))
    hashes = (*SYSTEM, *own)
    return ask(f"{chat}-{number}", 16 * len(hashes) + 1, hashes=hashes)


def shared_tokens(plan: Planner, request: PlanRequest, held: int, now: float = 0.0) -> int:
    """Place a request where `held` of its blocks are; return what of them counts as shared."""
    place = plan.plan(request, [view("a", matched_blocks=held)], now)
    assert isinstance(place, Place)
    plan.finish(request.request_id, 1, "answered", now)
    return place.winner.num_shared_tokens


def test_a_prefix_at_which_three_conversations_parted_is_shared_from_then_on() -> None:
    plan = planner()
    found = [shared_tokens(plan, turn(f"chat{i}", 1), 40) for i in range(5)]
    assert found == [0, 0, 0, 640, 640]
    assert shared_tokens(plan, turn("chat0", 2), 45) == 640  # Its own 80 tokens are not.


def test_the_turns_of_one_conversation_make_nothing_shared() -> None:
    plan = planner()
    assert [shared_tokens(plan, turn("chat", i), 35 + 5 * i) for i in range(1, 12)] == [0] * 11


def test_heat_halves_in_a_minute_and_the_longest_untouched_is_forgotten() -> None:
    heat = PrefixHeat()
    assert [heat.touch(b"a", 2, 0.0) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert heat.num_shared_blocks((b"-", b"a", b"b"), 3, 0.0) == 2
    assert heat.num_shared_blocks((b"-", b"a", b"b"), 3, 60.0) == 0  # 2 of 4 are left.
    assert heat.touch(b"a", 2, 60.0) == 3.0
    for i in range(MAX_PREFIXES):
        heat.touch(str(i).encode(), 1, 60.0)
    assert heat.touch(b"a", 2, 60.0) == 1.0


def test_a_request_that_waits_is_counted_when_it_is_placed_and_not_when_it_is_looked_at() -> None:
    config = PlannerConfig(queue=QueueConfig(accept_s=2.0))
    plan = Planner({"t": build_policy("prefix_cost", {}, owner="test")}, config=config)
    full = [view("a", matched_blocks=40, reserved_prefill_tokens=9000)]
    for _ in range(5):
        assert isinstance(plan.plan(turn("waiting", 1), full, 0.0), Wait)
    plan.leave("m", "waiting-1")
    assert shared_tokens(plan, turn("other", 1), 40) == 0
    assert shared_tokens(plan, turn("third", 1), 40) == 0

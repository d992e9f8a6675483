"""Where new conversations start while caches lose conversations just before they come again."""

from __future__ import annotations

from router.policy.choice import replayed
from router.policy.planner import Planner
from router.policy.prefix_cost import PrefixCost
from router.policy.reuse_depth import MAX_PROMPTS
from router.policy.types import Place, PlanRequest
from tests.router.policy.build import ask, planner, view

CACHE_TOKENS = 16_000
POLICY = PrefixCost()


def prompt(chat: str, num_blocks: int) -> PlanRequest:
    hashes = tuple(f"{chat}:{i}".encode() for i in range(num_blocks))
    return ask(f"{chat}-{num_blocks}", 16 * num_blocks + 1, hashes=hashes)


def serve(
    plan: Planner,
    request: PlanRequest,
    *,
    held: int = 0,
    at: str = "a",
    cache: int | None = CACHE_TOKENS,
) -> None:
    """Place a request at the only target, which holds so many of its blocks, and end it."""
    target = view(at, matched_blocks=held, kv_tokens=cache)
    assert isinstance(plan.plan(request, [target], 0.0), Place)
    plan.finish(request.request_id, 1, "answered", 0.0)


def starts(plan: Planner, number: int, *, queued: int = 0) -> Place:
    """Place a conversation that is new everywhere on one of three; `queued` waits at the first."""
    targets = [view(name, kv_tokens=CACHE_TOKENS) for name in ("b", "c")]
    busy = view("a", kv_tokens=CACHE_TOKENS, reserved_prefill_tokens=queued)
    request = prompt(f"new{number}", 20)
    place = plan.plan(request, [busy, *targets], 0.0)
    assert isinstance(place, Place)
    plan.finish(request.request_id, 1, "answered", 0.0)
    return place


def come_back(plan: Planner, chat: str, *, after: int, cache: int | None = CACHE_TOKENS) -> None:
    """Serve two turns of a conversation, and prompts of so many tokens between them."""
    serve(plan, prompt(chat, 10), cache=cache)
    for i in range(after // 800):
        serve(plan, prompt(f"{chat}-other{i}", 50), cache=cache)
    serve(plan, prompt(chat, 20), held=10, cache=cache)


def winners(plan: Planner) -> list[str]:
    return [starts(plan, number).winner.target.replica for number in range(3)]


def test_new_conversations_spread_while_old_ones_come_again_early() -> None:
    plan = planner()
    come_back(plan, "chat", after=8_000)
    assert sorted(winners(plan)) == ["a", "b", "c"]


def test_they_start_at_the_first_target_once_the_oldest_quarter_of_a_cache_is_found_again() -> None:
    plan = planner()
    come_back(plan, "chat", after=12_800)
    assert winners(plan) == ["a", "a", "a"]


def test_early_returns_outweigh_late_ones_three_to_one() -> None:
    plan = planner()
    for number in range(2):
        come_back(plan, f"early{number}", after=800)
    come_back(plan, "late", after=12_800)
    assert winners(plan) == ["a", "a", "a"]
    for number in range(2, 5):
        come_back(plan, f"early{number}", after=800)
    assert sorted(winners(plan)) == ["a", "b", "c"]


def test_starting_at_the_first_is_worth_no_more_than_ones_own_prefill() -> None:
    plan = planner()
    come_back(plan, "chat", after=12_800)
    place = starts(plan, 0, queued=200)
    assert place.winner.target.replica == "a"
    spared = next(c for c in place.candidates if c.target.replica == "b")
    assert POLICY.parts(spared, place.candidates)[-1].value == 0.321
    assert starts(plan, 1, queued=800).winner.target.replica != "a"


def test_a_known_conversation_goes_home_whoever_is_spared() -> None:
    plan = planner()
    come_back(plan, "chat", after=12_800)
    targets = [view("a", kv_tokens=CACHE_TOKENS)]
    targets.append(view("b", kv_tokens=CACHE_TOKENS, matched_blocks=10))
    place = plan.plan(prompt("at-b", 20), targets, 0.0)
    assert isinstance(place, Place)
    assert place.winner.target.replica == "b"


def test_a_recorded_start_is_decided_again_from_its_candidates() -> None:
    plan = planner()
    come_back(plan, "chat", after=12_800)
    place = starts(plan, 0)
    assert replayed(place, prompt("new0", 20), POLICY, gateway="gw").replica == "a"


def test_a_cache_of_unknown_size_tells_nothing() -> None:
    plan = planner()
    come_back(plan, "chat", after=12_800, cache=None)
    assert sorted(winners(plan)) == ["a", "b", "c"]


def test_a_replica_that_left_is_forgotten() -> None:
    plan = planner()
    serve(plan, prompt("chat", 10))
    plan.forget(["a"])
    for number in range(16):
        serve(plan, prompt(f"other{number}", 50))
    serve(plan, prompt("chat", 20), held=10)
    assert sorted(winners(plan)) == ["a", "b", "c"]


def test_the_longest_ago_placed_prompts_are_forgotten() -> None:
    plan = planner()
    serve(plan, prompt("chat", 10))
    for number in range(MAX_PROMPTS):
        serve(plan, prompt(f"short{number}", 1), at="b")
    for number in range(16):
        serve(plan, prompt(f"long{number}", 50))
    serve(plan, prompt("chat", 20), held=10)
    assert sorted(winners(plan)) == ["a", "b", "c"]

"""Why a prediction was wrong: every cause, by what was known and what was found."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.index import TrustMode
from router.observe.causes import available_tokens, cause_of
from router.policy.types import Place
from router.request.usage import RealisedUsage
from tests.conditions import until
from tests.router.policy.build import ask, planner, view
from tests.router.running_gateway import (
    GLOBEX_KEY,
    TENANTS,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)


def placed(*, cached: int, pending: int = 0, mode: TrustMode = "EXACT") -> Place:
    """Place a prompt of 161 tokens of which some 16-token blocks are cached, some on their way."""
    target = view("a", matched_blocks=cached, pending_blocks=pending, mode=mode)
    place = planner("round_robin").plan(
        ask(), [target, view("b", matched_blocks=9, draining=True)], 0.0
    )
    assert isinstance(place, Place)
    return place


def judge(place: Place, cached: int | None, **facts: Any) -> str | None:
    known = {"num_prompt_tokens": 161, "num_prompts": 1, "is_foreign": False}
    prompt_tokens = facts.pop("said_prompt_tokens", 161)
    usage = RealisedUsage(prompt_tokens=prompt_tokens, completion_tokens=1, cached_tokens=cached)
    return cause_of(place, usage, **(known | facts))


@pytest.mark.fault("router-57")
@pytest.mark.parametrize(
    ("place", "cached", "facts", "cause"),
    [
        (placed(cached=4), 64, {}, "none"),
        (placed(cached=4), 32, {}, "evicted"),
        (placed(cached=4), 0, {"is_foreign": True}, "salt"),
        (placed(cached=4), 0, {}, "evicted"),
        (placed(cached=4, pending=2), 64, {}, "pending"),
        (placed(cached=4, pending=2), 80, {}, "pending"),
        (placed(cached=4, pending=2), 96, {}, "sibling"),
        (placed(cached=4), 96, {}, "stored_since"),
        (placed(cached=4, mode="DEGRADED"), 32, {}, "degraded"),
        (placed(cached=0, mode="FALLBACK"), 32, {}, "fallback"),
        (placed(cached=0, mode="FALLBACK"), 0, {}, "none"),
        (placed(cached=4), 64, {"said_prompt_tokens": 170}, "template"),
        (placed(cached=4), 128, {"num_prompts": 2}, "several_prompts"),
        (placed(cached=4), None, {}, None),
    ],
)
def test_a_difference_has_a_cause(
    place: Place, cached: int | None, facts: dict[str, Any], cause: str | None
) -> None:
    assert judge(place, cached, **facts) == cause


def test_what_was_available_is_the_most_that_any_target_held() -> None:
    assert available_tokens(placed(cached=4)) == 144


async def record_of(running: Running, prompt: list[int], key: str) -> dict[str, Any]:
    _, _, headers = await running.post("/v1/completions", completion(prompt), key=key)
    request_id = headers["x-request-id"]
    await until(lambda: running.gateway.decisions.get(request_id) is not None)
    _, record = await running.admin(f"/admin/decisions/{request_id}")
    return dict(record)


@pytest.mark.fault("router-57")
async def test_a_workload_miss_a_routing_miss_and_a_stale_index_can_be_told_apart() -> None:
    cached, turns = (t for t in TENANTS)
    pair = (
        type(cached)(name="acme", keys=cached.keys, isolation="pair"),
        type(turns)(name="globex", keys=turns.keys, isolation="pair", policy="round_robin"),
    )
    acme = "sk-acme-0123456789"
    prompt = [(7 * i) % 250 for i in range(200)]
    async with running_gateway(gateway_spec(tenants=pair)) as running:
        workload = await record_of(running, prompt, acme)
        hit = await record_of(running, prompt, acme)
        holder = next(r for r in running.replicas if r.bodies)
        routing = await record_of(running, prompt, GLOBEX_KEY)
        holder.forget_silently()
        stale = await record_of(running, prompt, acme)
        shown = [
            (
                record["num_available_tokens"],
                record["num_predicted_tokens"],
                record["usage"]["cached_tokens"],
                record["cause"],
            )
            for record in (workload, hit, routing, stale)
        ]
        assert shown == [
            (0, 0, 0, "none"),
            (192, 192, 192, "none"),
            (192, 0, 0, "none"),
            (192, 192, 0, "evicted"),
        ]
        _, metrics = await running.admin("/metrics")
        labels = '{model="tiny",tenant="acme"}'
        assert f"prefixfleet_available_cached_tokens_total{labels} 384.0" in metrics
        assert f"prefixfleet_predicted_cached_tokens_total{labels} 384.0" in metrics
        assert f"prefixfleet_realised_cached_tokens_total{labels} 192.0" in metrics
        causes = '{cause="evicted",model="tiny",tenant="acme"}'
        assert f"prefixfleet_prediction_causes_total{causes} 1.0" in metrics

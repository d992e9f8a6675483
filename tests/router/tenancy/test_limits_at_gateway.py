"""Limits as a client meets them: on every route, in OpenAI's words, and by what really ran."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from router.app import build_client_app
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.limits import ScopeUse, Settlement
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.usage import UsageRecord
from tests.conditions import until
from tests.router.fake_replica import Behaviour, key_hash
from tests.router.running_gateway import (
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)
from tests.router.tenancy.fleet import limited

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("hello", max_tokens=4),
    "/v1/completions": completion("hello", max_tokens=4),
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 4},
}
PROMPT = completion("x" * 100, max_tokens=4)
USAGE = UsageRecord(
    at=0.0,
    request_id="r",
    tenant="acme",
    key="ci",
    model="tiny",
    uncached_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    charged_tokens=0,
    queue_s=None,
    ttft_s=None,
    duration_s=0.0,
    status=200,
    outcome="ok",
)


async def used(running: Running, tenant: str = "acme") -> ScopeUse:
    """Return what a tenant has used, once every request is settled."""
    limiter = running.gateway.tenancy.limiter

    async def is_settled() -> bool:
        (use,) = await limiter.uses([f"tenant/{tenant}"])
        return use.num_running == 0

    await until(is_settled)
    (use,) = await limiter.uses([f"tenant/{tenant}"])
    return use


@pytest.mark.fault("router-55")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_route_enforces_every_limit(path: str, stream: bool) -> None:
    cases: dict[str, tuple[Limits, str, str]] = {
        "rpm": (Limits(requests_per_minute=1), "rate_limit_exceeded", "1 requests per minute"),
        "tpm": (Limits(tokens_per_minute=9), "rate_limit_exceeded", "9 tokens per minute"),
        "day": (Limits(tokens_per_day=9), "insufficient_quota", "9 tokens per day (UTC)"),
        "month": (Limits(tokens_per_month=9), "insufficient_quota", "9 tokens per month (UTC)"),
    }
    tenants = [
        TenantConfig(name=name, keys=(TenantKey(hash=key_hash(f"sk-{name}")),), limits=limits)
        for name, (limits, _, _) in cases.items()
    ]
    tenants.append(
        TenantConfig(
            name="key",
            keys=(TenantKey(hash=key_hash("sk-key"), limits=Limits(requests_per_minute=1)),),
        )
    )
    cases["key"] = (Limits(), "rate_limit_exceeded", "this key may use 1 requests per minute")
    async with running_gateway(gateway_spec(tenants=tuple(tenants)), replicas=1) as running:
        for name, (_, code, says) in cases.items():
            body = {**ROUTES[path], "stream": stream}
            for _ in range(2):
                async with running.session.post(
                    running.url + path, json=body, headers={"authorization": f"Bearer sk-{name}"}
                ) as response:
                    status, headers = response.status, response.headers
                    answer = None if status == 200 else await response.json()
            assert answer is not None, name
            assert (status, answer["error"]["code"]) == (429, code)
            assert says in answer["error"]["message"]
            assert int(headers["retry-after"]) >= 1
        _, text = await running.admin("/metrics")
        assert 'prefixfleet_limit_hits_total{limit="day",tenant="day"}' in text


@pytest.mark.fault("router-55")
async def test_no_route_that_spends_engine_time_is_missing_from_these_tests() -> None:
    async with running_gateway(replicas=0) as running:
        app = build_client_app(running.gateway)
        posts = {
            r.resource.canonical for r in app.router.routes() if r.method == "POST" and r.resource
        }
        assert posts - {"/tokenize", "/detokenize"} == set(ROUTES)


async def test_parallel_requests_are_limited_until_one_ends() -> None:
    async with running_gateway(
        gateway_spec(tenants=(limited(max_parallel=1),)), replicas=1
    ) as running:
        (replica,) = running.replicas
        replica.behaviour = Behaviour(hold=asyncio.Event())
        first = asyncio.create_task(running.post("/v1/completions", PROMPT, key="sk-acme"))
        await until(lambda: replica.num_running == 1)
        status, answer, headers = await running.post("/v1/completions", PROMPT, key="sk-acme")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "1 requests at a time" in answer["error"]["message"]
        assert replica.behaviour.hold is not None
        replica.behaviour.hold.set()
        assert (await first)[0] == 200
        await used(running)
        assert (await running.post("/v1/completions", PROMPT, key="sk-acme"))[0] == 200


async def test_the_official_client_reads_what_is_left_and_meets_its_own_errors() -> None:
    tenant = limited(requests_per_minute=2, tokens_per_minute=1000, tokens_per_day=400)
    async with running_gateway(gateway_spec(tenants=(tenant,)), replicas=1) as running:
        client = running.client("sk-acme")
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt="x" * 100, max_tokens=4
        )
        prompt_tokens = raw.parse().usage.prompt_tokens  # type: ignore[union-attr]
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-limit-tokens"] == "1000"
        assert raw.headers["x-ratelimit-remaining-tokens"] == str(1000 - prompt_tokens - 4)
        assert raw.headers["x-ratelimit-reset-requests"].startswith("1m")
        await used(running)
        with pytest.raises(openai.RateLimitError) as quota:
            await client.completions.create(model="tiny", prompt="y" * 300, max_tokens=4)
        assert (quota.value.code, quota.value.type) == ("insufficient_quota",) * 2
        await client.completions.create(model="tiny", prompt="z", max_tokens=4)
        with pytest.raises(openai.RateLimitError) as rate:
            await client.completions.create(model="tiny", prompt="z", max_tokens=4)
        assert (rate.value.code, rate.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert rate.value.response.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.fault("router-50")
async def test_real_tokens_are_charged_and_cached_ones_at_a_tenth() -> None:
    async with running_gateway(gateway_spec(tenants=(limited(),)), replicas=1) as running:
        _, first, _ = await running.post("/v1/completions", PROMPT, key="sk-acme")
        prompt = first["usage"]["prompt_tokens"]
        assert (await used(running)).day_tokens == prompt + 3
        _, second, _ = await running.post("/v1/completions", PROMPT, key="sk-acme")
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 96
        # 5 uncached + 9.6 + 3 generated, rounded up.
        assert (await used(running)).day_tokens == prompt + 3 + (prompt - 96) + 13


@pytest.mark.fault("router-53")
async def test_a_stream_without_usage_is_charged_until_its_budget_is_spent() -> None:
    async with running_gateway(
        gateway_spec(tenants=(limited(tokens_per_day=320),)), replicas=1
    ) as running:
        for i in range(5):
            body = {"model": "tiny", "prompt": f"{i}" * 100, "max_tokens": 4, "stream": True}
            async with running.session.post(
                f"{running.url}/v1/completions",
                json=body,
                headers={"authorization": "Bearer sk-acme"},
            ) as response:
                text = await response.text()
                if response.status == 429:
                    break
                assert "usage" not in text
            await used(running)
        assert '"code":"insufficient_quota"' in text
        assert i == 3
        assert (await used(running)).day_tokens == 3 * 104


async def test_a_cancelled_stream_pays_for_what_ran() -> None:
    async with running_gateway(gateway_spec(tenants=(limited(),)), replicas=1) as running:
        (replica,) = running.replicas
        replica.behaviour = Behaviour(num_words=50, hang_at=7)
        body = {**PROMPT, "max_tokens": 50, "stream": True}
        async with running.session.post(
            f"{running.url}/v1/completions", json=body, headers={"authorization": "Bearer sk-acme"}
        ) as response:
            async for line in response.content:
                if b"w6" in line:
                    break
        assert (await used(running)).day_tokens == 101 + 7


async def test_what_no_replica_began_costs_nothing() -> None:
    async with running_gateway(
        gateway_spec(tenants=(limited(),), max_attempts=1), replicas=1
    ) as running:
        running.replicas[0].behaviour = Behaviour(status=500)
        status, _, _ = await running.post("/v1/completions", PROMPT, key="sk-acme")
        assert status == 502
        use = await used(running)
        assert (use.day_tokens, use.num_tokens, use.num_requests) == (0, 0, 1)


async def test_beyond_the_soft_limit_answers_carry_a_warning() -> None:
    async with running_gateway(
        gateway_spec(tenants=(limited(tokens_per_day=200, tokens_per_month=10_000),)), replicas=1
    ) as running:
        _, _, first = await running.post("/v1/completions", PROMPT, key="sk-acme")
        await used(running)
        _, _, second = await running.post("/v1/completions", completion("y" * 80), key="sk-acme")
        assert "x-prefixfleet-budget-warning" not in first
        assert second["x-prefixfleet-budget-warning"] == "tokens per day: 94% used"


async def test_expected_output_follows_what_the_tenant_usually_generates() -> None:
    async with running_gateway(gateway_spec(tenants=(limited(),)), replicas=1) as running:
        remaining = []
        running.gateway.tenancy.live.declare([limited(tokens_per_minute=10_000)])
        for i in range(2):
            _, _, headers = await running.post("/v1/chat/completions", chat(f"{i}"), key="sk-acme")
            remaining.append(int(headers["x-ratelimit-remaining-tokens"]))
            before = (await used(running)).num_tokens
        # The first claim expected 256 tokens of output, the second the 3 that it had seen.
        assert 10_000 - remaining[0] - 256 == before // 2 - 3
        assert 10_000 - remaining[1] == before


async def test_a_tenant_beyond_its_limit_does_not_even_have_its_prompts_tokenized() -> None:
    async with running_gateway(
        gateway_spec(tenants=(limited(requests_per_minute=1),)), replicas=1
    ) as running:
        for status in (200, 429):
            assert (await running.post("/v1/completions", PROMPT, key="sk-acme"))[0] == status
        unreadable = completion("x", temperature="hot")
        status, answer, headers = await running.post("/v1/completions", unreadable, key="sk-acme")
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["x-ratelimit-remaining-requests"] == "0"
        running.gateway.tenancy.live.declare([limited(requests_per_minute=2)])
        status, _, _ = await running.post("/v1/completions", unreadable, key="sk-acme")
        assert status == 400


async def test_streams_carry_what_is_left_too() -> None:
    async with (
        running_gateway(
            gateway_spec(tenants=(limited(requests_per_minute=9),)), replicas=1
        ) as running,
        running.session.post(
            f"{running.url}/v1/completions",
            json={**PROMPT, "stream": True},
            headers={"authorization": "Bearer sk-acme"},
        ) as response,
    ):
        assert response.headers["x-ratelimit-remaining-requests"] == "8"
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.fault("router-53")
@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_under_another_name_is_charged_to_the_same_budget(path: str) -> None:
    tenant = limited(tokens_per_day=1000)
    tenant = msgspec.structs.replace(tenant, aliases={"gpt-4": "tiny"})
    async with running_gateway(gateway_spec(tenants=(tenant,)), replicas=1) as running:
        spent = []
        for i, model in enumerate(("tiny", "gpt-4")):
            body = {**ROUTES[path], "model": model, "cache_salt": f"{i}"}
            assert (await running.post(path, body, key="sk-acme"))[0] == 200
            spent.append((await used(running)).day_tokens)
        assert spent[1] == 2 * spent[0]
        (total,) = (await running.admin("/admin/usage"))[1]["totals"]
        assert (total["model"], total["requests"]) == ("tiny", 2)


async def test_requests_that_end_in_one_turn_are_settled_by_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    settle = LocalLimiter.settle

    async def counted(limiter: LocalLimiter, *settlements: Settlement) -> None:
        calls.append(len(settlements))
        await settle(limiter, *settlements)

    monkeypatch.setattr(LocalLimiter, "settle", counted)
    async with running_gateway(gateway_spec(tenants=(limited(max_parallel=3),))) as running:
        tenancy = running.gateway.tenancy
        identity = await tenancy.identify("sk-acme")
        grants = [
            await tenancy.reserve(
                identity, id=f"r{i}", model="tiny", num_prompt_tokens=10, max_tokens=5
            )
            for i in range(3)
        ]
        for i, grant in enumerate(grants):
            tenancy.settle(grant, msgspec.structs.replace(USAGE, charged_tokens=i))
        use = await used(running)
    assert (calls, use.num_requests, use.num_tokens) == ([3], 3, 3)

"""Stock OpenAI-compatible engines behind the gateway: what they get, and what they never get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from router.config import StaticReplica
from router.fleet.static import exact_hint
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import Running, chat, completion, gateway_spec, running_gateway

Kind = Literal["auto", "openai", "vllm"]


@asynccontextmanager
async def in_front_of(*kinds: Kind, **engine: Any) -> AsyncIterator[Running]:
    """Run a gateway without index or tenants in front of engines e0, e1, ..."""
    engines = [FakeReplica(f"e{i}") for i in range(len(kinds))]
    for one in engines:
        await one.start()
    static = tuple(
        StaticReplica(url=f"{one.url}/v1/", kind=kind, name=one.id, **engine)
        for one, kind in zip(engines, kinds, strict=True)
    )
    spec = gateway_spec(tenants=(), replicas=static)
    async with running_gateway(spec, replicas=0, with_index=False) as running:
        running.replicas.extend(engines)
        yield running


async def test_it_serves_at_once_in_fallback_and_says_so() -> None:
    async with in_front_of("openai", "openai") as running:
        answers = [await running.post("/v1/completions", completion(f"{i}")) for i in range(4)]
        assert {status for status, _, _ in answers} == {200}
        assert {headers["x-prefixfleet-mode"] for _, _, headers in answers} == {"FALLBACK"}
        assert [len(engine.bodies) for engine in running.replicas] == [2, 2]
        assert [m.id for m in (await running.client().models.list()).data] == ["tiny"]
        _, health = await running.admin("/health", key=None)
        assert (health["mode"], health["index"]["configured"]) == ("FALLBACK", False)


async def test_an_opaque_engine_gets_an_allow_listed_body_and_no_secret() -> None:
    async with in_front_of("openai") as running:
        sent = chat(
            "hello",
            tools=[{"type": "function"}],
            temperature=1.5,
            top_k=4,
            priority=-9,
            prompt_cache_key="k",
            user="u",
        )
        status, answer, _ = await running.post("/v1/chat/completions", sent)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "w0 w1 w2 ")
        (engine,) = running.replicas
        assert engine.bodies == [
            {name: sent[name] for name in ("model", "messages", "tools", "temperature", "user")}
        ]
        assert "authorization" not in engine.headers[0]


async def test_a_vllm_gets_the_tenants_salt_and_its_own_fields_but_no_priority() -> None:
    async with in_front_of("vllm") as running:
        await running.post("/v1/completions", completion("x", top_k=4, priority=-9))
        (body,) = running.replicas[0].bodies
        assert body.pop("cache_salt") != ""
        assert body == {"model": "tiny", "prompt": "x", "top_k": 4}


async def test_an_engines_own_key_is_sent_to_it() -> None:
    async with in_front_of("openai", api_key="sk-of-the-engine") as running:
        await running.post("/v1/completions", completion("x"))
        assert running.replicas[0].headers[0]["authorization"] == "Bearer sk-of-the-engine"


async def test_streams_carry_usage_only_on_request_and_the_gateway_counts_it_anyway() -> None:
    async with in_front_of("openai") as running:
        client = running.client()
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].text for chunk in chunks] == ["w0 ", "w1 ", "w2 "]
        _, metrics = await running.admin("/metrics")
        assert 'completion_tokens_total{model="tiny",tenant="default"} 3.0' in metrics


async def test_a_field_that_is_not_passed_on_is_refused_by_name() -> None:
    async with in_front_of("openai") as running:
        status, answer, _ = await running.post("/v1/completions", completion("x", magic=1))
        assert (status, answer["error"]["param"]) == (400, "magic")


async def test_an_engine_that_dies_is_left_out_and_taken_back() -> None:
    async with in_front_of("openai", "openai") as running:
        dying, staying = running.replicas
        dying.behaviour = Behaviour(die_at=0, status=None)
        await dying.stop()
        for i in range(4):
            status, _, headers = await running.post("/v1/completions", completion(f"{i}"))
            assert (status, headers["x-prefixfleet-replica"]) == (200, staying.id)
        await until(lambda: not running.gateway.view.replicas[0].live)
        _, listed = await running.admin("/admin/replicas")
        assert [replica["live"] for replica in listed["replicas"]] == [False, True]
        assert "cannot connect" in listed["replicas"][0]["reason"]


@pytest.mark.parametrize(
    ("url", "base", "id"),
    [
        ("http://host:8000", "http://host:8000", "host:8000"),
        ("http://host:8000/v1/", "http://host:8000", "host:8000"),
        ("https://host/api/v1", "https://host/api", "host/api"),
    ],
)
def test_both_spellings_of_a_base_url_work(url: str, base: str, id: str) -> None:
    replica = StaticReplica(url=url)
    assert (replica.base_url, replica.id) == (base, id)


async def test_the_hint_names_the_flags_that_publish_the_events() -> None:
    async with in_front_of("vllm") as running:
        hint = exact_hint(running.gateway.view.replicas[0])
        assert "replica e0" in hint
        assert "--kv-events-config" in hint
        assert "`events: auto`" in hint

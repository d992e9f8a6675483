"""One look at the fleet: what the dashboard and `top` show."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
from rich.console import Console

from router.api.live import MAX_TENANTS, LiveState
from router.config import TenantConfig
from router.launch.top import screen
from router.policy.queueing import QueueConfig
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import (
    GLOBEX_KEY,
    MemoryStores,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

LONG = "the long story of a lonely lighthouse keeper " * 8


async def test_a_look_counts_requests_and_cached_tokens_by_tenant() -> None:
    async with running_gateway() as running:
        for _ in range(3):
            await running.post("/v1/chat/completions", chat(LONG))
        await running.post("/v1/chat/completions", chat(LONG), key=GLOBEX_KEY)
        await running.post("/v1/chat/completions", chat(LONG, model="none"))
        status, body = await running.admin("/admin/live?once=true")
        assert status == 200
        state = msgspec.convert(body, LiveState)
        acme, globex = state.tenants
        assert (acme.requests, acme.refused, globex.requests) == (4, 0, 1)
        assert acme.available_tokens == acme.predicted_tokens == acme.realised_tokens == 640
        assert globex.realised_tokens == 0
        assert [record.status for record in state.decisions] == [200, 200, 200, 200, 404]
        assert (state.admin, state.role, len(state.replicas)) == ("fleet", "admin", 2)
        shown = io.StringIO()
        Console(file=shown, width=120).print(screen(body))
        assert "2 of 2 replicas live, 0 requests in flight" in shown.getvalue()
        assert "acme" in shown.getvalue()


async def test_a_look_says_how_many_tenants_there_are_beyond_those_it_shows() -> None:
    tenants = tuple(TenantConfig(name=f"tenant-{i}") for i in range(MAX_TENANTS + 1))
    async with running_gateway(gateway_spec(tenants=tenants), replicas=0) as running:
        _, body = await running.admin("/admin/live?once=true")
    assert (len(body["tenants"]), body["num_tenants"]) == (100, 101)
    shown = io.StringIO()
    Console(file=shown, width=120).print(screen(body))
    assert "the first 100 of 101; `tenant list` has all" in shown.getvalue()


async def test_the_stream_ends_with_the_key_that_follows_it() -> None:
    async with running_gateway(replicas=0) as running:
        made = {"alias": "eye", "role": "viewer"}
        _, viewer = await running.admin("/admin/admins", method="POST", body=made)
        headers = {"authorization": f"Bearer {viewer['key']}"}
        async with running.session.get(f"{running.admin_url}/admin/live", headers=headers) as live:
            assert await live.content.readuntil(b"\n\n")
            status, _ = await running.admin("/admin/admins/eye", method="DELETE")
            assert status == 200
            await asyncio.wait_for(live.content.read(), 10)


async def test_the_newest_decisions_can_be_listed_for_one_tenant() -> None:
    async with running_gateway(replicas=1) as running:
        for name in ("a", "b", "c"):
            await running.post("/v1/chat/completions", chat("hi"), **{"x-request-id": name})
        await running.post("/v1/chat/completions", chat("hi"), key=GLOBEX_KEY)
        _, body = await running.admin("/admin/decisions?tenant=acme&limit=2")
        assert [record["request_id"] for record in body["decisions"]] == ["c", "b"]
        status, body = await running.admin("/admin/decisions?limit=0")
        assert (status, body["error"]["param"]) == (400, "limit")


async def test_hot_prefixes_name_who_holds_them() -> None:
    async with running_gateway() as running:
        for _ in range(3):
            await running.post("/v1/chat/completions", chat(LONG))
        await running.post("/v1/chat/completions", chat("something else"))
        _, body = await running.admin("/admin/index/hot")
        (prefix,) = body["prefixes"]
        # 20 full blocks; counted at 16.
        assert (prefix["tenant"], prefix["num_blocks"], prefix["num_tokens"]) == ("acme", 16, 256)
        assert list(prefix["holders"].values()) == [16]
        assert 2.9 < prefix["heat"] <= 3.0
        assert (prefix["parent"], prefix["num_held_blocks"], prefix["num_duplicates"]) == (
            None,
            16,
            0,
        )


async def test_hot_prefixes_are_a_tree_whose_duplicates_are_counted_once() -> None:
    spec = gateway_spec(default_policy="round_robin")
    async with running_gateway(spec) as running:
        for turns in (2, 2, 4, 4, 4, 4):
            prompt = [1] * 16 * turns
            await running.post("/v1/completions", completion(prompt, max_tokens=1))
        _, body = await running.admin("/admin/index/hot")
        longer, shorter = body["prefixes"]
        assert (longer["num_blocks"], shorter["num_blocks"]) == (4, 2)
        assert (longer["parent"], shorter["parent"]) == (shorter["name"], None)
        assert longer["holders"] == shorter["holders"] | {"r0/0": 4, "r1/0": 4}
        # Of four blocks two are the parent's; each of the others is there twice.
        assert (longer["num_held_blocks"], longer["num_duplicates"]) == (2, 2)
        assert (shorter["num_held_blocks"], shorter["num_duplicates"]) == (2, 2)


async def test_without_the_index_nobody_knows_who_holds_a_prefix() -> None:
    stores = MemoryStores()
    async with running_gateway(stores=stores) as running:
        for _ in range(2):
            await running.post("/v1/chat/completions", chat(LONG))
        stores.down = True
        await until(lambda: running.gateway.view.store_down_reason is not None)
        _, body = await running.admin("/admin/index/hot")
        assert "connection refused" in body["reason"]
        assert [prefix["holders"] for prefix in body["prefixes"]] == [{}]
        stores.down = False


async def test_a_replica_shows_its_hit_rate_and_its_restarts() -> None:
    async with running_gateway(replicas=1) as running:
        for _ in range(2):
            await running.post("/v1/completions", completion([1] * 33, max_tokens=1))

        async def shown() -> dict[str, Any]:
            _, body = await running.admin("/admin/replicas")
            (state,) = body["replicas"]
            return dict(state)

        state = await shown()
        assert (state["prompt_tokens"], state["cached_tokens"]) == (66, 32)
        assert state["num_restarts"] == 0
        record = await running.register(running.replicas[0])
        await until(lambda: running.knows(record))
        assert (await shown())["num_restarts"] == 1


async def test_a_replica_holds_what_its_engine_cores_hold_together() -> None:
    async with running_gateway(replicas=0) as running:
        await running.add(FakeReplica("one"), num_blocks=100)
        await running.add(FakeReplica("two"), num_blocks=100, dp_size=2)
        _, body = await running.admin("/admin/replicas")
        assert {r["id"]: r["max_blocks"] for r in body["replicas"]} == {"one": 100, "two": 200}


async def test_policies_are_listed_with_their_defaults() -> None:
    async with running_gateway(gateway_spec(default_policy="session"), replicas=0) as running:
        _, body = await running.admin("/admin/policies")
        assert (body["default"], body["default_params"]) == ("session", {})
        params = {policy["name"]: policy["params"] for policy in body["policies"]}
        assert params["round_robin"] == {}
        assert params["session"] == {"max_load_factor": 1.5, "min_load": 4.0}


async def test_what_waits_is_counted_for_its_tenant() -> None:
    # At the assumed 1000 tokens/s, one prompt of 50 tokens keeps a replica from taking another.
    spec = gateway_spec(queue=QueueConfig(accept_s=0.04))
    async with running_gateway(spec, replicas=1) as running:
        hold = asyncio.Event()
        running.replicas[0].behaviour = Behaviour(hold=hold)
        calls = [
            asyncio.create_task(running.post("/v1/completions", completion([i + 1] * 50)))
            for i in range(3)
        ]
        planner = running.gateway.planner
        await until(lambda: planner.num_waiting_of("acme") == 2)
        _, body = await running.admin("/admin/live?once=true")
        assert {tenant["name"]: tenant["num_waiting"] for tenant in body["tenants"]} == {
            "acme": 2,
            "globex": 0,
        }
        assert body["num_waiting"] == 2
        hold.set()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200, 200, 200]


async def test_the_playground_is_limited_and_charged_as_its_tenant() -> None:
    async with running_gateway(replicas=1) as running:
        body = {"tenant": "acme", "model": "tiny", "prompt": "hello", "max_tokens": 3}
        status, played = await running.admin("/admin/playground", method="POST", body=body)
        assert status == 200
        assert played["answer"]["choices"][0]["message"]["content"] == "w0 w1 w2 "
        assert played["decision"]["tenant"] == "acme"
        status, error = await running.admin(
            "/admin/playground", method="POST", body={**body, "tenant": "nobody"}
        )
        assert (status, error["error"]["param"]) == (404, "tenant")
        status, error = await running.admin(
            "/admin/playground", method="POST", body={**body, "model": "none"}
        )
        assert status == 404

"""One look at the fleet: what the dashboard and `top` show."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from router.api.live import LiveState
from router.launch.top import screen
from tests.router.running_gateway import GLOBEX_KEY, chat, running_gateway

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

"""LoRA adapters through the gateway: names, placement by the adapter's own blocks, conflicts."""

from __future__ import annotations

from typing import Any

from kvindex.registry import ReplicaRecord, ServedAdapter
from router.fleet.adapters import pinned_adapters, served_names
from tests.conditions import until
from tests.router.fake_replica import IDENTITY, SCHEME, FakeReplica
from tests.router.running_gateway import Running, chat, running_gateway

SQL = ServedAdapter("sql", "/adapters/sql", "d1")
OTHER_SQL = ServedAdapter("sql", "/adapters/sql", "d2")
LONG = "the long story of a lonely lighthouse keeper " * 8


def record(replica_id: str, epoch: int, *adapters: ServedAdapter, model: str = "tiny") -> Any:
    """Describe a replica by what matters here."""
    return ReplicaRecord(
        id=replica_id,
        kind="prefixfleet",
        url="http://unused",
        epoch=epoch,
        served_models=(model,),
        identity=IDENTITY,
        hash_scheme=SCHEME,
        known_answer=b"",
        adapters=adapters,
    )


async def ask(running: Running, model: str) -> tuple[str, int]:
    """Send one long chat: which replica answered, and how much of it was cached there."""
    status, answer, headers = await running.post("/v1/chat/completions", chat(LONG, model=model))
    assert status == 200, answer
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return headers["x-prefixfleet-replica"], cached


async def model_names(running: Running) -> list[str]:
    return [model.id async for model in running.client().models.list()]


async def test_an_adapter_is_a_model_that_goes_where_its_own_blocks_are() -> None:
    async with running_gateway(replicas=0) as running:
        for name in ("r0", "r1"):
            await running.add(FakeReplica(name), adapters=(SQL,))
        assert sorted(await model_names(running)) == ["sql", "tiny"]
        home, cached = await ask(running, "sql")
        assert cached == 0
        await running.nothing_runs()
        assert (await ask(running, "tiny"))[1] == 0, "the model has none of the adapter's blocks"
        await running.nothing_runs()
        again, cached = await ask(running, "sql")
        assert again == home
        assert cached > 0
        bodies = [body for replica in running.replicas for body in replica.bodies]
        assert sorted(body["model"] for body in bodies) == ["sql", "sql", "tiny"]


async def test_the_predicted_hit_of_an_adapter_is_the_one_that_happens() -> None:
    async with running_gateway(replicas=0) as running:
        await running.add(FakeReplica("r0"), adapters=(SQL,))
        await ask(running, "sql")
        await running.nothing_runs()
        _, answer, headers = await running.post("/v1/chat/completions", chat(LONG, model="sql"))
        realised = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert realised > 0
        assert headers["x-prefixfleet-cached-tokens-predicted"] == str(realised)


async def test_an_adapter_that_only_one_replica_has_is_asked_of_that_one() -> None:
    async with running_gateway(replicas=1) as running:
        await running.add(FakeReplica("special"), adapters=(SQL,))
        assert {(await ask(running, "sql"))[0] for _ in range(3)} == {"special"}


async def test_an_adapter_loaded_later_is_served_and_an_unloaded_one_is_gone() -> None:
    async with running_gateway(replicas=1) as running:
        (replica,) = running.replicas
        assert await model_names(running) == ["tiny"]
        await running.register(replica, adapters=(SQL,))
        await until(lambda: "sql" in running.gateway.view.models())
        assert (await ask(running, "sql"))[0] == "r0"
        await running.register(replica)
        await until(lambda: "sql" not in running.gateway.view.models())
        status, answer, _ = await running.post("/v1/chat/completions", chat("hi", model="sql"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_replica_that_means_something_else_by_a_name_does_not_serve_it() -> None:
    async with running_gateway(replicas=0) as running:
        await running.add(FakeReplica("old"), adapters=(SQL,))
        await running.add(FakeReplica("new"), adapters=(OTHER_SQL,))
        served = {replica.id: replica.served_models for replica in running.gateway.view.replicas}
        assert served == {"old": ("tiny", "sql"), "new": ("tiny",)} or served == {
            "old": ("tiny",),
            "new": ("tiny", "sql"),
        }


def test_the_oldest_replica_says_what_a_name_means() -> None:
    old, new = record("b", 1, SQL), record("a", 2, OTHER_SQL)
    pins = pinned_adapters([new, old])
    assert pins == {"sql": SQL}
    assert served_names(old, pins) == ("tiny", "sql")
    assert served_names(new, pins) == ("tiny",)


def test_the_name_of_a_model_is_never_an_adapter() -> None:
    adapter = ServedAdapter("tiny", "/adapters/tiny")
    pins = pinned_adapters([record("a", 1, adapter, model="large"), record("b", 2)])
    assert pins == {}
    assert served_names(record("a", 1, adapter, model="large"), pins) == ("large",)

"""A stock vLLM that joins the fleet by its KV events: predicted as exactly as a replica of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvindex.hashing import HashScheme, known_answer
from router.config import StaticReplica
from router.fleet.replica import Replica
from tests.conditions import until
from tests.engine.frontend.tiny_tokenizer import tiny_bundle, write_model_folder
from tests.kvindex.foreign_engine import BLOCK
from tests.router.fake_replica import FakeReplica
from tests.router.fake_vllm import FakeVllm
from tests.router.running_gateway import (
    MemoryStores,
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

OTHER_SCHEME = HashScheme(block_size=8)
OTHER_ANSWER = known_answer(OTHER_SCHEME)
TEXT = "Once upon a midnight dreary, while I pondered, weak and weary, over many a quaint " * 3


@dataclass
class Bridged:
    """A gateway and the vLLM that it bridges."""

    running: Running
    vllm: FakeVllm

    @property
    def replica(self) -> Replica:
        """The vLLM as the gateway sees it."""
        return next(r for r in self.running.gateway.view.replicas if r.id == "v")

    async def is_in(self, mode: str, reason: str = "") -> None:
        """Wait until the vLLM is registered in this mode, for this reason."""

        def reached() -> bool:
            replica = self.replica
            found = replica.report if replica.pool is not None else None
            return found is not None and found.mode == mode and reason in found.reason

        try:
            await until(reached, seconds=8)
        except TimeoutError:
            raise AssertionError(f"{self.replica.reason!r} {self.replica.report}") from None

    async def send(self, path: str, body: dict[str, Any]) -> tuple[str, int, int]:
        """Send a request; return replica, predicted and realised cached tokens."""
        status, answer, headers = await self.running.post(path, body)
        assert status == 200, answer
        return (
            headers["x-prefixfleet-replica"],
            int(headers["x-prefixfleet-cached-tokens-predicted"]),
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    async def index_holds(self, num_blocks: int) -> None:
        """Wait until the index holds so many blocks of the vLLM."""

        def reached() -> bool:
            return (self.replica.num_blocks or {}).get("gpu") == num_blocks

        await until(reached, seconds=8)


@asynccontextmanager
async def bridging(
    vllm: FakeVllm,
    *,
    replicas: int = 1,
    stores: MemoryStores | None = None,
    id: str = "gw-test",
    **fields: Any,
) -> AsyncIterator[Bridged]:
    """Run a gateway with replicas of ours, and a bridge to a vLLM called v."""
    if not vllm.url:
        await vllm.start()
    static = StaticReplica(url=vllm.url, name="v", **({"kind": "vllm", "events": "auto"} | fields))
    spec = gateway_spec(replicas=(static,))
    async with running_gateway(spec, replicas=replicas, stores=stores, id=id) as running:
        yield Bridged(running, vllm)


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    vllm = FakeVllm()
    yield vllm
    await vllm.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(TEXT)),
        ("/v1/completions", completion(TEXT)),
        ("/v1/completions", completion(list(range(32, 132)))),
    ],
    ids=["chat", "completion", "token ids"],
)
async def test_a_vllm_is_predicted_exactly_at_its_own_granularity(
    vllm: FakeVllm, path: str, body: dict[str, Any]
) -> None:
    async with bridging(vllm) as bridge:
        await bridge.is_in("EXACT")
        (ours,) = bridge.running.replicas
        await ours.leave()
        await until(lambda: not bridge.running.gateway.view.replicas[-1].live)
        assert await bridge.send(path, body) == ("v", 0, 0)
        num_cached = len(bridge.vllm._cached) * BLOCK
        await bridge.index_holds(num_cached // 16)
        replica, predicted, realised = await bridge.send(path, body)
        assert (replica, predicted, realised) == ("v", num_cached, num_cached)
        assert predicted % BLOCK == 0 < predicted


async def test_a_prefix_goes_where_it_is_held_whoever_holds_it(vllm: FakeVllm) -> None:
    async with bridging(vllm) as bridge:
        await bridge.is_in("EXACT")
        prompts = [completion(f"{i} {TEXT}") for i in range(6)]
        first = {}
        for i, prompt in enumerate(prompts):
            first[i], predicted, realised = await bridge.send("/v1/completions", prompt)
            assert predicted == realised == 0
        assert set(first.values()) == {"v", "r0"}
        held = len(bridge.vllm._cached) * 2
        await bridge.index_holds(held)
        for i, prompt in enumerate(prompts):
            replica, predicted, realised = await bridge.send("/v1/completions", prompt)
            assert replica == first[i]
            assert predicted == realised > 0


async def test_what_the_engine_evicts_is_not_predicted(vllm: FakeVllm) -> None:
    async with bridging(vllm) as bridge:
        await bridge.is_in("EXACT")
        (ours,) = bridge.running.replicas
        await ours.leave()
        await bridge.send("/v1/completions", completion(TEXT))
        await bridge.index_holds(len(vllm._cached) * 2)
        await vllm.evict_all()
        await bridge.index_holds(0)
        assert await bridge.send("/v1/completions", completion(TEXT)) == ("v", 0, 0)


async def test_load_and_size_are_the_engines_own(vllm: FakeVllm) -> None:
    async with bridging(vllm) as bridge:
        await bridge.is_in("EXACT")
        report, record = bridge.replica.report, bridge.replica.record
        assert (report.num_running, report.num_waiting, report.kv_usage) == (3, 2, 0.25)
        assert record is not None
        assert (record.kind, record.num_blocks, record.hit_granularity) == ("vllm", 1456, BLOCK)
        assert bridge.replica.token is None


async def test_a_fleet_of_vllms_alone_takes_the_tokenizer_from_their_model_folder(
    tmp_path: Path,
) -> None:
    vllm = FakeVllm(root=str(write_model_folder(tmp_path / "model")))
    async with bridging(vllm, replicas=0) as bridge:
        await bridge.is_in("EXACT")
        await bridge.send("/v1/chat/completions", chat(TEXT))
        await bridge.index_holds(len(vllm._cached) * 2)
        _, predicted, realised = await bridge.send("/v1/chat/completions", chat(TEXT))
        assert predicted == realised > 0
    await vllm.stop()


async def test_what_our_own_replicas_would_refuse_is_passed_to_vllms_alone(tmp_path: Path) -> None:
    vllm = FakeVllm(root=str(write_model_folder(tmp_path / "model")))
    async with bridging(vllm, replicas=0) as bridge:
        await bridge.is_in("EXACT")
        body = chat(TEXT, structured_outputs={"choice": ["yes", "no"]}, best_of=1)
        status, answer, _ = await bridge.running.post("/v1/chat/completions", body)
        assert (status, "best_of" in str(answer)) == (400, True)
        del body["best_of"]
        await bridge.send("/v1/chat/completions", body)
        assert vllm.bodies[-1]["structured_outputs"] == {"choice": ["yes", "no"]}
    await vllm.stop()


async def test_without_any_tokenizer_the_engine_serves_and_the_remedy_is_named(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="prefixfleet.router.bridge"):
        async with bridging(vllm, replicas=0) as bridge:
            await until(lambda: "set `tokenizer` to a folder" in caplog.text)
            assert (await bridge.send("/v1/chat/completions", chat(TEXT)))[0] == "v"


@pytest.mark.fault("router-13")
async def test_an_engine_with_another_chat_template_is_degraded_and_says_where_it_differs() -> None:
    vllm = FakeVllm(bundle=tiny_bundle(template="{{ messages[-1]['content'] }}"))
    async with bridging(vllm) as bridge:
        await bridge.is_in("DEGRADED", "its chat template makes the known conversation 17 tokens")
    await vllm.stop()


async def test_an_engine_that_restarts_with_another_template_is_looked_at_again(
    vllm: FakeVllm,
) -> None:
    async with bridging(vllm) as bridge:
        await bridge.is_in("EXACT")
        vllm.become(tiny_bundle(template="{{ messages[-1]['content'] }}"))
        await vllm.stream.break_connections()
        await bridge.is_in("DEGRADED", "its chat template makes the known conversation 17 tokens")


@pytest.mark.fault("router-14")
async def test_an_engine_with_another_tokenizer_is_kept_out_of_the_pool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vllm = FakeVllm(bundle=tiny_bundle(add_bos=False))
    with caplog.at_level("INFO", logger="prefixfleet.router.bridge"):
        async with bridging(vllm) as bridge:
            await until(lambda: "it is of another model or tokenizer" in caplog.text)
            assert bridge.replica.pool is None
            assert bridge.running.gateway.view.mode_of(bridge.replica) == "FALLBACK"
            _, listed = await bridge.running.admin("/admin/replicas")
            reasons = {replica["id"]: replica["reason"] for replica in listed["replicas"]}
            assert "it is of another model or tokenizer" in reasons["v"]
            assert reasons["r0"] == ""
    await vllm.stop()


@pytest.mark.fault("router-5")
async def test_an_engine_that_does_not_publish_is_reported(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.tells_events = False
    with caplog.at_level("INFO", logger="prefixfleet.router.bridge"):
        async with bridging(vllm) as bridge:
            await until(lambda: "does not say where it publishes KV events" in caplog.text)
            assert bridge.running.gateway.view.mode_of(bridge.replica) == "FALLBACK"


@pytest.mark.fault("router-5")
async def test_an_engine_whose_event_socket_is_dead_is_in_fallback_with_the_reason(
    vllm: FakeVllm,
) -> None:
    async with bridging(vllm, events="tcp://127.0.0.1:9", replay="tcp://127.0.0.1:9") as bridge:
        await bridge.is_in("FALLBACK", "it has published no KV events yet")


async def test_two_gateways_bridge_one_engine_once(vllm: FakeVllm) -> None:
    stores = MemoryStores()
    async with (
        bridging(vllm, stores=stores, id="gw-1") as first,
        bridging(vllm, replicas=0, stores=stores, id="gw-2") as second,
    ):
        await first.is_in("EXACT")
        await second.is_in("EXACT")
        epoch = first.replica.record and first.replica.record.epoch
        (ours,) = first.running.replicas
        await ours.leave()
        await first.send("/v1/completions", completion(TEXT))
        await second.index_holds(len(vllm._cached) * 2)
        replica, predicted, realised = await second.send("/v1/completions", completion(TEXT))
        assert (replica, predicted) == ("v", realised)
        assert predicted > 0
        assert second.replica.record is not None
        assert second.replica.record.epoch == epoch


async def test_the_engine_of_a_gateway_that_died_is_taken_over(vllm: FakeVllm) -> None:
    stores = MemoryStores()
    assert await stores.registry.claim("bridge/v", "gw-dead", lease_s=0.3)
    async with bridging(vllm, stores=stores) as bridge:
        await bridge.is_in("EXACT")
        assert not await stores.registry.claim("bridge/v", "gw-dead", lease_s=0.3)


async def test_a_gateway_that_ends_takes_its_engines_out_and_leaves_the_claim_to_others(
    vllm: FakeVllm,
) -> None:
    stores = MemoryStores()
    async with bridging(vllm, stores=stores) as bridge:
        await bridge.is_in("EXACT")
        assert [record.id for record in await stores.registry.records()] == ["r0", "v"]
    assert [record.id for record in await stores.registry.records()] == ["r0"]
    assert await stores.registry.claim("bridge/v", "gw-2", lease_s=1)


async def test_a_vllm_alone_moves_into_the_pool_of_a_replica_of_ours_that_comes_later(
    tmp_path: Path,
) -> None:
    vllm = FakeVllm(root=str(write_model_folder(tmp_path / "model")))
    async with bridging(vllm, replicas=0) as bridge:
        await bridge.is_in("EXACT")
        ours = FakeReplica("r0")
        await bridge.running.add(ours, hash_scheme=OTHER_SCHEME, known_answer=OTHER_ANSWER)

        def is_moved() -> bool:
            record = bridge.replica.record
            return record is not None and record.hash_scheme == OTHER_SCHEME

        await until(is_moved, seconds=10)
        await bridge.is_in("EXACT")
    await vllm.stop()

"""Replicas that refuse, fail, hang and die: what the client sees, and what the gateway learns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvindex.index import LoadReport
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import (
    ACME_KEY,
    GLOBEX_KEY,
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

FAILURES = {
    "500": Behaviour(status=500),
    "502": Behaviour(status=502),
    "503": Behaviour(status=503),
    "dies before its first token": Behaviour(die_at=0),
    "ends before its first token": Behaviour(truncate_at=0),
    "answers garbage": Behaviour(garbage_at=0),
    "accepts and never answers": Behaviour(hang_at=0),
}


def quick(**router: Any) -> Any:
    """Return a spec that gives up on a silent replica soon, and picks r0 and r1 in turn."""
    return gateway_spec(first_token_timeout_s=1.0, default_policy="round_robin", **router)


async def read_stream(running: Running, body: dict[str, Any]) -> tuple[int, list[str]]:
    """POST a streaming chat and return the status and the data of all events."""
    headers = {"authorization": f"Bearer {ACME_KEY}"}
    url = running.url + "/v1/chat/completions"
    async with running.session.post(url, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, [x[6:] for x in text.split("\n\n") if x.startswith("data: ")]


@pytest.mark.fault("router-44")
@pytest.mark.fault("router-46")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_no_request_fails_because_one_replica_does(failure: str, stream: bool) -> None:
    async with running_gateway(quick()) as running:
        running.replicas[0].behaviour = FAILURES[failure]
        for i in range(4):
            status, events = await read_stream(running, chat(f"hello {i}", stream=stream))
            assert status == 200
            if stream:
                assert events[-1] == "[DONE]"
                texts = [json.loads(x)["choices"][0]["delta"].get("content") for x in events[:-1]]
                assert texts == [None, "w0 ", "w1 ", "w2 "]
        assert len(running.replicas[1].bodies) == 4
        await running.nothing_runs()


@pytest.mark.fault("router-44")
async def test_a_dead_warm_replica_does_not_eat_the_attempts() -> None:
    async with running_gateway() as running:
        body = chat("a long enough prompt to have several blocks in the cache " * 4)
        _, _, headers = await running.post("/v1/chat/completions", body)
        warm = next(r for r in running.replicas if r.id == headers["x-prefixfleet-replica"])
        await warm.stop()
        for _ in range(5):
            status, _, headers = await running.post("/v1/chat/completions", body)
            assert status == 200
            assert headers["x-prefixfleet-replica"] != warm.id
        planner, now = running.gateway.planner, running.gateway.clock.monotonic()
        assert planner.breaker_state(warm.id, now) in ("closed", "open", "half_open")
        _, listed = await running.admin("/metrics")
        assert 'cause="connect"' in listed


@pytest.mark.fault("router-43")
async def test_a_clients_4xx_opens_no_breaker_and_is_told_in_the_replicas_words() -> None:
    async with running_gateway() as running:
        said = {"message": "stop: too many", "type": "invalid_request_error", "param": "stop"}
        for replica in running.replicas:
            replica.behaviour = Behaviour(status=400, error=said)
        for _ in range(10):
            status, answer, _ = await running.post("/v1/chat/completions", chat("x"))
            assert status == 400
            assert answer["error"] == {**said, "code": None}
        assert sum(len(replica.bodies) for replica in running.replicas) == 10
        now = running.gateway.clock.monotonic()
        states = [running.gateway.planner.breaker_state(f"r{i}", now) for i in range(2)]
        assert states == ["closed", "closed"]
        for replica in running.replicas:
            replica.behaviour = Behaviour()
        status, _, _ = await running.post("/v1/chat/completions", chat("x"))
        assert status == 200


@pytest.mark.fault("router-43")
async def test_5xx_does_open_the_breaker_and_an_open_one_is_asked_no_more() -> None:
    async with running_gateway(quick()) as running:
        running.replicas[0].behaviour = Behaviour(status=500)
        for i in range(12):
            status, _, _ = await running.post("/v1/chat/completions", chat(f"{i}"))
            assert status == 200
        assert len(running.replicas[0].bodies) == 3
        _, metrics = await running.admin("/metrics")
        assert 'prefixfleet_breaker_state{replica="r0",state="open"} 1.0' in metrics


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_replica_that_refuses_the_gateway_is_not_the_clients_fault(status: int) -> None:
    async with running_gateway(replicas=1) as running:
        running.replicas[0].behaviour = Behaviour(status=status)
        answer_status, answer, _ = await running.post("/v1/chat/completions", chat("x"))
        assert (answer_status, answer["error"]["code"]) == (502, "replica_lost")


async def test_a_full_replica_sends_the_request_on_and_a_full_fleet_says_429() -> None:
    async with running_gateway(quick()) as running:
        running.replicas[0].behaviour = Behaviour(status=429)
        for i in range(2):
            status, _, _ = await running.post("/v1/chat/completions", chat(f"{i}"))
            assert status == 200
        running.replicas[1].behaviour = Behaviour(status=429)
        status, answer, headers = await running.post("/v1/chat/completions", chat("x"))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["retry-after"] == "1"


BREAKS = {
    "dies": Behaviour(die_at=2),
    "is truncated": Behaviour(truncate_at=2),
    "turns to garbage": Behaviour(garbage_at=2),
    "stalls": Behaviour(hang_at=2),
}


@pytest.mark.fault("router-45")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("behaviour", BREAKS)
async def test_an_answer_that_breaks_half_way_is_gone_on_with_elsewhere(
    behaviour: str, stream: bool
) -> None:
    async with running_gateway(quick(stall_timeout_s=1.0)) as running:
        running.replicas[0].behaviour = BREAKS[behaviour]
        if stream:
            _, events = await read_stream(running, chat("hello", stream=True))
            texts = [json.loads(x)["choices"][0]["delta"].get("content") for x in events[:-1]]
            assert (texts, events[-1]) == ([None, "w0 ", "w1 ", "w2 "], "[DONE]")
            assert "prefixfleet" not in "".join(events)
        else:
            _, answer, _ = await running.post("/v1/chat/completions", chat("hello"))
            assert answer["choices"][0]["message"]["content"] == "w0 w1 w2 "
            assert answer["usage"]["completion_tokens"] == 3
        first, second = (replica.bodies[0]["prefixfleet"] for replica in running.replicas)
        assert second["seed"] == first["seed"]
        (choice,) = second["resume"]["choices"]
        assert (choice["token_ids"], choice["text_length"]) == ([0, 1], 6)
        await running.nothing_runs()


@pytest.mark.fault("router-45")
@pytest.mark.parametrize("behaviour", BREAKS)
async def test_a_stream_that_nobody_can_finish_ends_with_a_typed_error_and_no_end_marker(
    behaviour: str,
) -> None:
    async with running_gateway(quick(stall_timeout_s=1.0)) as running:
        for replica in running.replicas:
            replica.behaviour = BREAKS[behaviour]
        status, events = await read_stream(running, chat("hello", stream=True))
        assert status == 200
        texts = [json.loads(x)["choices"][0]["delta"].get("content") for x in events[:-1]]
        assert texts == [None, "w0 ", "w1 "]
        error = json.loads(events[-1])["error"]
        assert (error["type"], error["code"]) == ("server_error", "replica_lost")
        assert [len(replica.bodies) for replica in running.replicas] == [1, 1]
        assert running.num_active() == 0


@pytest.mark.fault("router-45")
async def test_only_a_replica_that_computes_alike_goes_on_with_a_stream() -> None:
    async with running_gateway(quick(), replicas=0) as running:
        for i in range(2):
            await running.add(FakeReplica(f"r{i}"), execution_digest=f"weights-{i}")
        running.replicas[0].behaviour = Behaviour(die_at=2)
        _, events = await read_stream(running, chat("hello", stream=True))
        assert json.loads(events[-1])["error"]["code"] == "replica_lost"
        assert running.replicas[1].bodies == []


async def test_an_answer_that_the_client_has_not_seen_begins_anew_on_another_kind() -> None:
    async with running_gateway(quick(), replicas=0) as running:
        for i in range(2):
            await running.add(FakeReplica(f"r{i}"), execution_digest=f"weights-{i}")
        running.replicas[0].behaviour = Behaviour(die_at=2)
        status, answer, _ = await running.post("/v1/chat/completions", chat("hello"))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "w0 w1 w2 ")
        assert running.replicas[1].bodies[0]["prefixfleet"]["resume"] is None


async def test_a_request_that_two_replicas_died_of_is_given_to_no_other() -> None:
    async with running_gateway(quick(max_attempts=5), replicas=4) as running:
        for replica in running.replicas:
            replica.behaviour = Behaviour(die_at=0)
        for tenant in (ACME_KEY, GLOBEX_KEY):
            status, answer, headers = await running.post(
                "/v1/chat/completions", chat("poison"), key=tenant
            )
            assert (status, answer["error"]["code"]) == (502, "replica_lost")
            assert sum(len(replica.bodies) for replica in running.replicas) == 2
        assert headers["retry-after"] == "600"
        for replica in running.replicas:
            replica.behaviour = Behaviour()
        status, _, _ = await running.post("/v1/chat/completions", chat("harmless"))
        assert status == 200


async def test_a_stream_that_two_replicas_died_of_is_not_resumed_again() -> None:
    async with running_gateway(quick(max_attempts=5), replicas=3) as running:
        for replica in running.replicas:
            replica.behaviour = Behaviour(die_at=1)
        _, events = await read_stream(running, chat("poison", stream=True))
        assert json.loads(events[-1])["error"]["code"] == "replica_lost"
        assert sum(len(replica.bodies) for replica in running.replicas) == 2


async def test_retries_are_a_share_of_the_traffic() -> None:
    spec = quick(retry_share=0.5, retry_burst=1)
    async with running_gateway(spec) as running:
        for replica in running.replicas:
            replica.behaviour = Behaviour(status=429)
        for i in range(5):
            await running.post("/v1/completions", completion(f"{i}"))
        # One retry at first; after that, two requests earn another.
        assert sum(len(replica.bodies) for replica in running.replicas) == 5 + 3


async def test_a_replica_that_hangs_is_left_when_its_lease_has_lapsed() -> None:
    async with running_gateway(gateway_spec(lapse_grace_s=0.1), replicas=2) as running:
        hung, other = running.replicas
        other.behaviour = Behaviour(status=503)
        hung.behaviour = Behaviour(hang_at=1)
        stream = asyncio.create_task(read_stream(running, chat("hello", stream=True)))
        await until(lambda: hung.num_running == 1)
        other.behaviour = Behaviour()
        await hung.leave()
        _, events = await stream
        texts = [json.loads(x)["choices"][0]["delta"].get("content") for x in events[:-1]]
        assert (texts, events[-1]) == ([None, "w0 ", "w1 ", "w2 "], "[DONE]")


async def test_silence_on_every_replica_is_a_timeout() -> None:
    async with running_gateway(quick()) as running:
        for replica in running.replicas:
            replica.behaviour = Behaviour(hang_at=0)
        status, answer, _ = await running.post("/v1/chat/completions", chat("x"))
        assert (status, answer["error"]["code"]) == (504, "first_token_timeout")
        await until(lambda: all(replica.num_running == 0 for replica in running.replicas))


async def test_a_long_wait_is_bridged_by_comments_and_an_error_after_them_is_an_event() -> None:
    spec = gateway_spec(first_token_timeout_s=1.0, keep_alive_s=0.05)
    async with running_gateway(spec, replicas=1) as running:
        running.replicas[0].behaviour = Behaviour(hang_at=0)
        headers = {"authorization": f"Bearer {ACME_KEY}"}
        url = running.url + "/v1/chat/completions"
        body = chat("x", stream=True)
        async with running.session.post(url, json=body, headers=headers) as response:
            lines = (await response.text()).split("\n\n")
        assert response.status == 200
        assert lines[0] == lines[1] == ": keep-alive"
        assert json.loads(lines[-2][6:])["error"]["code"] == "first_token_timeout"
        assert lines[-1] == ""
        status, record = await running.admin(f"/admin/decisions/{response.headers['x-request-id']}")
        assert (status, record["status"]) == (200, 504)


@pytest.mark.fault("router-46")
async def test_a_stuck_replica_holds_up_nobody_else() -> None:
    spec = gateway_spec(default_policy="round_robin", connect_timeout_s=30.0)
    async with running_gateway(spec) as running:
        hold = asyncio.Event()
        running.replicas[0].behaviour = Behaviour(hold=hold)
        stuck = [
            asyncio.create_task(running.post("/v1/completions", completion(f"s{i}")))
            for i in range(240)
        ]
        await until(lambda: running.replicas[0].num_running == 120, seconds=20.0)
        await until(lambda: len(running.replicas[1].bodies) == 120, seconds=20.0)
        await until(lambda: sum(task.done() for task in stuck) == 120, seconds=20.0)
        hold.set()
        assert {status for status, _, _ in await asyncio.gather(*stuck)} == {200}
        assert running.num_active() == 0


@pytest.mark.fault("router-47")
async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with running_gateway(gateway_spec(default_policy="round_robin")) as running:
        leaving, staying = running.replicas
        hold = asyncio.Event()
        leaving.behaviour = Behaviour(hold=hold)
        staying.behaviour = Behaviour(hold=hold)
        streams = [
            asyncio.create_task(read_stream(running, chat(f"{i}", stream=True))) for i in range(10)
        ]
        await until(lambda: leaving.num_running == staying.num_running == 5)
        await leaving.report(LoadReport(mode="EXACT", draining=True))
        staying.behaviour = Behaviour()
        for i in range(5):
            status, _, headers = await running.post("/v1/completions", completion(f"new {i}"))
            assert (status, headers["x-prefixfleet-replica"]) == (200, staying.id)
        hold.set()
        finished = await asyncio.gather(*streams)
        assert all(status == 200 and events[-1] == "[DONE]" for status, events in finished)
        assert len(leaving.bodies) == 5


@pytest.mark.fault("router-48")
async def test_overload_is_429_with_retry_after_and_503_means_no_replica() -> None:
    async with running_gateway(gateway_spec(max_in_flight=1)) as running:
        hold = asyncio.Event()
        for replica in running.replicas:
            replica.behaviour = Behaviour(hold=hold)
        first = asyncio.create_task(running.post("/v1/completions", completion("x")))
        await until(lambda: any(replica.num_running for replica in running.replicas))
        status, answer, headers = await running.post("/v1/completions", completion("y"))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["retry-after"] == "1"
        hold.set()
        assert (await first)[0] == 200
    async with running_gateway(replicas=0) as running:
        status, answer, headers = await running.post("/v1/completions", completion("x"))
        assert (status, answer["error"]["code"]) == (503, "no_available_replica")
        assert headers["retry-after"] == "1"


async def test_a_replica_restarted_under_its_name_is_credited_with_nothing_from_before() -> None:
    async with running_gateway(replicas=1) as running:
        body = chat("a long enough prompt to have several blocks in the cache " * 4)
        await running.post("/v1/chat/completions", body)
        (replica,) = running.replicas
        await replica.stop()
        await replica.start()
        record = await running.register(replica)
        await until(lambda: running.knows(record))
        status, answer, headers = await running.post("/v1/chat/completions", body)
        assert (status, headers["x-prefixfleet-cached-tokens-predicted"]) == (200, "0")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_replica_that_left_for_good_is_asked_no_more() -> None:
    async with running_gateway() as running:
        leaving: FakeReplica = running.replicas[0]
        await leaving.leave()
        for i in range(4):
            status, _, headers = await running.post("/v1/completions", completion(f"{i}"))
            assert (status, headers["x-prefixfleet-replica"]) == (200, "r1")
        assert leaving.bodies == []

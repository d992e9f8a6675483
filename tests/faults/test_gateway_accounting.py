"""Clients that go away, permits and counters: nothing is counted for longer than it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from kvindex.index import Reservation, Target
from router.policy.types import Place
from tests.conditions import until
from tests.router.fake_replica import Behaviour
from tests.router.running_gateway import (
    ACME_KEY,
    POOL_ID,
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

ENDLESS = Behaviour(hang_at=3, num_words=2000)
PATHS = {
    "/v1/chat/completions": chat("hello"),
    "/v1/completions": completion("hello"),
}


async def hang_up(response: aiohttp.ClientResponse) -> None:
    """Read the first words of a stream, then close the connection."""
    text = b""
    while b"w2 " not in text:
        text += await response.content.readany()
    response.close()


async def open_stream(running: Running, path: str) -> aiohttp.ClientResponse:
    """Start a stream and return its response, unread."""
    return await running.session.post(
        running.url + path,
        json={**PATHS[path], "stream": True},
        headers={"authorization": f"Bearer {ACME_KEY}"},
    )


@pytest.mark.fault("router-41")
@pytest.mark.parametrize("path", PATHS)
async def test_hanging_up_in_mid_stream_aborts_in_the_replica_at_once(path: str) -> None:
    async with running_gateway(replicas=1) as running:
        (replica,) = running.replicas
        replica.behaviour = ENDLESS
        response = await open_stream(running, path)
        await hang_up(response)
        await until(lambda: replica.num_aborted == 1, seconds=1.0)
        await running.nothing_runs()
        request_id = response.headers["x-request-id"]
        await until(lambda: running.gateway.decisions.get(request_id) is not None)
        record = running.gateway.decisions.get(request_id)
        assert record is not None
        assert record.status == 499


@pytest.mark.fault("router-41")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_hanging_up_before_any_answer_aborts_too(stream: bool) -> None:
    async with running_gateway(replicas=1) as running:
        (replica,) = running.replicas
        replica.behaviour = Behaviour(hold=asyncio.Event())
        call = asyncio.create_task(
            running.post("/v1/chat/completions", chat("hello", stream=stream))
        )
        await until(lambda: replica.num_running == 1)
        call.cancel()
        await until(lambda: replica.num_aborted == 1, seconds=1.0)
        await running.nothing_runs()
        breaker = running.gateway.planner.breaker_state("r0", running.gateway.clock.monotonic())
        assert breaker == "closed"


@pytest.mark.fault("router-38")
async def test_fifty_cancelled_streams_leave_no_load_behind() -> None:
    async with running_gateway() as running:
        for replica in running.replicas:
            replica.behaviour = ENDLESS
        streams = await asyncio.gather(
            *(open_stream(running, "/v1/completions") for _ in range(50))
        )
        assert running.num_active() == 50
        assert running.index_load()[0] == 50
        await asyncio.gather(*(hang_up(response) for response in streams))
        await running.nothing_runs()
        await until(lambda: sum(replica.num_aborted for replica in running.replicas) == 50)


@pytest.mark.fault("router-39")
async def test_counts_end_at_zero_after_errors_retries_and_cancels() -> None:
    spec = gateway_spec(default_policy="round_robin", first_token_timeout_s=1.0)
    async with running_gateway(spec, replicas=3) as running:
        failing, refusing, _ = running.replicas
        failing.behaviour = Behaviour(die_at=1)
        refusing.behaviour = Behaviour(status=400)
        calls = [
            asyncio.create_task(
                running.post("/v1/completions", completion(f"{i}", stream=False), key=ACME_KEY)
            )
            for i in range(30)
        ]
        await until(lambda: any(task.done() for task in calls))
        for task in calls[::5]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await running.nothing_runs()
        accounts = running.gateway.planner.ledger.accounts.values()
        assert {(a.num_active, a.prefill_tokens) for a in accounts} == {(0, 0)}
        assert running.gateway.admission.num_admitted == 0


@pytest.mark.fault("router-40")
async def test_every_generating_path_counts_as_load() -> None:
    async with running_gateway(gateway_spec(default_policy="least_load"), replicas=4) as running:
        hold = asyncio.Event()
        for replica in running.replicas:
            replica.behaviour = Behaviour(hold=hold)
        calls: list[asyncio.Task[Any]] = []
        for i in range(24):
            for path, body in PATHS.items():
                for stream in (False, True):
                    sent = {**body, "stream": stream, "user": f"u{i}"}
                    calls.append(asyncio.create_task(post_and_read(running, path, sent)))
        await until(lambda: sum(replica.num_running for replica in running.replicas) == 96)
        assert [replica.num_running for replica in running.replicas] == [24, 24, 24, 24]
        hold.set()
        assert set(await asyncio.gather(*calls)) == {200}
        await running.nothing_runs()


async def post_and_read(running: Running, path: str, body: dict[str, Any]) -> int:
    """POST, read the whole answer of either form, and return the status."""
    headers = {"authorization": f"Bearer {ACME_KEY}"}
    async with running.session.post(running.url + path, json=body, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.fault("router-42")
async def test_a_permit_is_held_to_the_last_byte() -> None:
    async with running_gateway(gateway_spec(max_in_flight=8)) as running:
        for replica in running.replicas:
            replica.behaviour = ENDLESS
        streams = await asyncio.gather(
            *(open_stream(running, "/v1/chat/completions") for _ in range(20))
        )
        statuses = [response.status for response in streams]
        assert (statuses.count(200), statuses.count(429)) == (8, 12)
        assert sum(replica.num_running for replica in running.replicas) == 8
        refused = next(response for response in streams if response.status == 429)
        assert refused.headers["retry-after"] == "1"
        for response in streams:
            response.close()
        await running.nothing_runs()
        for replica in running.replicas:
            replica.behaviour = Behaviour()
        await until(lambda: running.gateway.admission.num_admitted == 0)
        status, _, _ = await running.post("/v1/completions", completion("x"))
        assert status == 200


async def test_the_prefill_stops_counting_at_the_first_token() -> None:
    async with running_gateway(replicas=1) as running:
        (replica,) = running.replicas
        hold = asyncio.Event()
        replica.behaviour = Behaviour(hold=hold, hang_at=3, num_words=9)
        call = asyncio.create_task(open_stream(running, "/v1/completions"))
        await until(lambda: replica.num_running == 1)
        requests, tokens = running.index_load()
        assert requests == 1
        assert tokens > 0
        hold.set()
        response = await call
        await until(lambda: running.index_load() == (1, 0))
        (account,) = running.gateway.planner.ledger.accounts.values()
        assert (account.num_active, account.prefill_tokens) == (1, 0)
        await hang_up(response)
        await running.nothing_runs()


@pytest.mark.fault("router-36")
async def test_a_request_that_has_ended_is_not_held_against_its_replica() -> None:
    # Its release may still be on the way to the index when the next request is planned.
    async with running_gateway(replicas=1) as running:
        for i in range(20):
            _, _, headers = await running.post("/v1/completions", completion(f"{i}"))
            record = running.gateway.decisions.get(headers["x-request-id"])
            assert record is not None
            (attempt,) = record.attempts
            assert isinstance(attempt.decision, Place)
            winner = attempt.decision.winner
            assert (winner.num_active, winner.queued_prefill_tokens) == (0, 0)


@pytest.mark.fault("router-36")
async def test_the_work_of_another_gateway_counts_beside_the_own() -> None:
    async with running_gateway(gateway_spec(default_policy="least_load")) as running:
        index = running.stores.index(POOL_ID)
        await index.touch_gateway("gw-other", lease_s=60.0)
        for i in range(3):
            reservation = Reservation(
                request_id=f"foreign-{i}",
                attempt=1,
                target=Target("r0"),
                gateway="gw-other",
                prefill_tokens=10,
                num_blocks=1,
            )
            await index.reserve(reservation)
        hold = asyncio.Event()
        for replica in running.replicas:
            replica.behaviour = Behaviour(hold=hold)
        calls = [
            asyncio.create_task(running.post("/v1/completions", completion(f"{i}")))
            for i in range(5)
        ]
        await until(lambda: sum(replica.num_running for replica in running.replicas) == 5)
        assert [replica.num_running for replica in running.replicas] == [1, 4]
        hold.set()
        await asyncio.gather(*calls)

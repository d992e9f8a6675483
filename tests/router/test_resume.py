"""A stream survives its replica: what the client reads is what an undisturbed run would say.

Two real fronts over real engine cores; the scripted executor's tokens depend on the KV contents
that it reads, so a resume with one token too many or too few changes everything after it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvindex.hashing import HashScheme, known_answer
from kvindex.index import LoadReport, Target
from kvindex.registry import ReplicaRecord
from tests.conditions import until
from tests.router.cable import Cable, cable_to
from tests.router.fake_replica import IDENTITY, LEASE_S, MODEL, TOKEN
from tests.router.running_gateway import (
    ACME_KEY,
    POOL_ID,
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)
from tests.worker.server.replica import RunningReplica, running_replica

LONG = {"max_tokens": 60, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat("a greedy one", temperature=0, **LONG)),
    ("/v1/chat/completions", chat("a drawn one", seed=3, **LONG)),
    ("/v1/chat/completions", chat("two of them", seed=4, n=2, **LONG)),
    ("/v1/chat/completions", chat("with its tokens", seed=5, return_token_ids=True, **LONG)),
    ("/v1/completions", completion("a plain one", seed=6, **LONG)),
    ("/v1/completions", completion(["one", "and another"], seed=7, n=2, **LONG)),
    ("/v1/completions", completion("held back", seed=8, stop=["\ufffd\ufffd\ufffd\ufffd"], **LONG)),
    ("/v1/completions", completion("not yet", seed=9, stop=["\ufffd"], min_tokens=50, **LONG)),
]


@dataclass(slots=True)
class Fleet:
    """A gateway over two real replicas, each behind a cable."""

    running: Running
    replicas: list[RunningReplica]
    cables: list[Cable]


@dataclass(slots=True)
class Answer:
    """What a client has read of one answer."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    num_roles: int = 0
    heads: set[tuple[str, int]] = field(default_factory=set)
    usage: Any = None
    last: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """All that must not depend on who computed it."""
        usage = (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        return self.texts, self.token_ids, self.ends, self.num_roles, usage, self.last


async def register(running: Running, name: str, url: str, replica: RunningReplica) -> None:
    index = running.stores.index(POOL_ID)
    target = Target(name)
    epoch = await index.register(target, boot_ns=1, lease_s=LEASE_S)
    await index.renew(target, epoch, lease_s=LEASE_S, report=LoadReport(mode="EXACT"))
    record = ReplicaRecord(
        id=name,
        kind="prefixfleet",
        url=url,
        epoch=epoch,
        served_models=(MODEL,),
        identity=IDENTITY,
        hash_scheme=HashScheme(),
        known_answer=known_answer(HashScheme()),
        max_model_len=replica.client.info.max_model_len,
        execution_digest=replica.client.info.execution_digest,
    )
    await running.stores.registry.publish(record, lease_s=LEASE_S)
    await until(lambda: running.knows(record))


@asynccontextmanager
async def fleet(*, step_s: float = 0.002, num_registered: int = 2) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        spec = gateway_spec(default_policy="round_robin")
        running = await stack.enter_async_context(running_gateway(spec, replicas=0))
        found = Fleet(running, [], [])
        for i in range(2):
            made = running_replica(internal_token=TOKEN, step_s=step_s, replica_id=f"r{i}")
            replica = await stack.enter_async_context(made)
            cable = await stack.enter_async_context(cable_to(replica.url))
            if i < num_registered:
                await register(running, f"r{i}", cable.url, replica)
            found.replicas.append(replica)
            found.cables.append(cable)
        yield found


async def read(running: Running, path: str, body: dict[str, Any]) -> Answer:
    """Read one answer as a stream to its end."""
    answer = Answer()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {ACME_KEY}"}
    async with running.session.post(running.url + path, json=asked, headers=headers) as response:
        text = await response.text()
    for data in (part[6:] for part in text.split("\n\n") if part.startswith("data: ")):
        answer.last = data
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        assert "prefixfleet" not in chunk
        answer.heads.add((chunk["id"], chunk["created"]))
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            take(answer, choice)
    return answer


def take(answer: Answer, choice: dict[str, Any]) -> None:
    index, delta = choice["index"], choice.get("delta") or {}
    answer.num_roles += "role" in delta
    new = choice.get("text") or delta.get("content") or ""
    answer.texts[index] = answer.texts.get(index, "") + new
    answer.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
    if choice["finish_reason"] is not None:
        answer.ends[index] = (choice["finish_reason"], choice.get("stop_reason"))


async def read_all(running: Running, requests: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    return await asyncio.gather(*(read(running, path, body) for path, body in requests))


@pytest.mark.fault("router-45")
@pytest.mark.parametrize("after_bytes", [4_000, 10_000, 20_000])
async def test_every_stream_goes_on_without_a_seam_when_its_replica_dies(after_bytes: int) -> None:
    async with fleet() as undisturbed:
        expected = await read_all(undisturbed.running, REQUESTS)
    async with fleet() as disturbed:
        disturbed.cables[0].cut_after_bytes = disturbed.cables[0].num_bytes + after_bytes
        answers = await read_all(disturbed.running, REQUESTS)
        assert [a.content for a in answers] == [a.content for a in expected]
        assert all(len(answer.heads) == 1 for answer in answers)
        _, metrics = await disturbed.running.admin("/metrics")
        assert 'prefixfleet_resumed_requests_total{replica="r1"}' in metrics
        await disturbed.running.nothing_runs()
        await until(lambda: all(replica.is_idle for replica in disturbed.replicas))


async def test_an_answer_begins_anew_whose_replica_dies_between_its_opening_and_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [REQUESTS[0]] * 2
    async with fleet() as undisturbed:
        expected = await read_all(undisturbed.running, asked)
    async with fleet() as disturbed:
        disturbed.cables[0].cut_after_event = b'"role":"assistant"'
        answers = await read_all(disturbed.running, asked)
        assert [a.content for a in answers] == [a.content for a in expected]
    assert "attempt failed" in caplog.text
    assert "cannot be resumed" not in caplog.text


async def test_a_stream_that_nobody_can_take_over_waits_a_moment_for_a_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, body = REQUESTS[0]
    async with fleet() as undisturbed:
        expected = await read(undisturbed.running, path, body)
    async with fleet(num_registered=1) as disturbed:
        running, (first, second) = disturbed.running, disturbed.cables
        await read(running, path, body)  # The gateway fetches the tokenizer through the cable.
        await disturbed.replicas[0].post("/reset_prefix_cache", {})
        first.cut_after_bytes = first.num_bytes + 4_000
        reading = asyncio.create_task(read(running, path, body))
        await until(lambda: "no place request_id=" in caplog.text)
        await register(running, "r1", second.url, disturbed.replicas[1])
        assert (await reading).content == expected.content


async def test_answers_that_are_not_streamed_survive_as_well() -> None:
    async with fleet() as undisturbed:
        expected = await post_all(undisturbed.running)
    async with fleet() as disturbed:
        disturbed.cables[0].cut_after_bytes = disturbed.cables[0].num_bytes + 20_000
        assert await post_all(disturbed.running) == expected


async def post_all(running: Running) -> list[Any]:
    answers = await asyncio.gather(*(running.post(path, body) for path, body in REQUESTS))
    for status, answer, _ in answers:
        assert status == 200, answer
        del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]
    return [answer for _, answer, _ in answers]


async def test_usage_tells_what_the_first_replica_found_cached() -> None:
    async with fleet() as running_fleet:
        running, (first, second) = running_fleet.running, running_fleet.cables
        path, body = "/v1/completions", completion([7] * 100, temperature=0, **LONG)
        for _ in range(2):  # Once on each.
            await read(running, path, body)
        before = {cable.num_bytes for cable in (first, second)}
        assert all(before)
        first.cut_after_bytes = first.num_bytes + 4_000
        second.cut_after_bytes = None
        for _ in range(2):
            answer = await read(running, path, body)
            cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached, answer.usage["completion_tokens"]) == (96, 60)


async def test_what_is_no_continuation_is_refused_by_the_replica() -> None:
    async with running_replica(internal_token=TOKEN) as replica:
        auth = {"Authorization": f"Bearer {TOKEN}"}
        resumed = {"index": 0, "token_ids": [97, 98], "text_length": 2}
        for change, problem in (
            ({"text_length": 3}, "choices[0]: 2 tokens show 2 characters, not 3"),
            ({"index": 1}, "choices[1]: this request has 1 choices"),
            ({"token_ids": [97, 999]}, "token_ids[1]: token id 999 is not in 0 to 269"),
        ):
            resume = {"created": 1, "choices": [resumed | change]}
            body = completion("hello", prefixfleet={"request_id": "x", "resume": resume})
            status, answer = await replica.post("/v1/completions", body, **auth)
            assert (status, answer["error"]["message"].endswith(problem)) == (400, True), answer

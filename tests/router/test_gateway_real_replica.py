"""The gateway over a replica's real front and engine core (scripted tokens): the whole path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvindex.hashing import HashScheme, known_answer
from kvindex.index import LoadReport, Target
from kvindex.registry import ReplicaRecord
from tests.conditions import until
from tests.router.fake_replica import IDENTITY, LEASE_S, MODEL, TOKEN
from tests.router.running_gateway import (
    ACME_KEY,
    POOL_ID,
    Running,
    chat,
    completion,
    running_gateway,
)
from tests.worker.server.replica import NUM_BLOCKS, RunningReplica, running_replica


@asynccontextmanager
async def gateway_over_real_replica() -> AsyncIterator[tuple[Running, RunningReplica]]:
    """Run a gateway whose only replica is a real front, registered by hand."""
    async with (
        running_replica(internal_token=TOKEN) as replica,
        running_gateway(replicas=0) as running,
    ):
        index = running.stores.index(POOL_ID)
        target = Target("real")
        epoch = await index.register(target, boot_ns=1, lease_s=LEASE_S)
        report = LoadReport(mode="EXACT")
        await index.renew(target, epoch, lease_s=LEASE_S, report=report)
        record = ReplicaRecord(
            id="real",
            kind="prefixfleet",
            url=replica.url,
            epoch=epoch,
            served_models=(MODEL,),
            identity=IDENTITY,
            hash_scheme=HashScheme(),
            known_answer=known_answer(HashScheme()),
            max_model_len=replica.client.info.max_model_len,
        )
        await running.stores.registry.publish(record, lease_s=LEASE_S)
        await until(lambda: running.knows(record))
        yield running, replica


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat("hello", max_tokens=8, seed=7)),
    "two choices": ("/v1/chat/completions", chat("hello", max_tokens=8, seed=7, n=2)),
    "token ids": (
        "/v1/chat/completions",
        chat("hello", max_tokens=8, seed=7, return_token_ids=True),
    ),
    "completion": ("/v1/completions", completion("hello", max_tokens=8, seed=7)),
    "two prompts": ("/v1/completions", completion(["hello", "again"], max_tokens=8, seed=7)),
    "prompt ids": (
        "/v1/completions",
        completion([104, 105], max_tokens=8, seed=7, return_token_ids=True),
    ),
    "logprobs of a chat": (
        "/v1/chat/completions",
        chat("hello", max_tokens=8, seed=7, n=2, logprobs=True, top_logprobs=3, prompt_logprobs=1),
    ),
    "penalties, bias and bans": (
        "/v1/chat/completions",
        chat(
            "hello",
            max_tokens=8,
            seed=7,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            min_p=0.1,
            logit_bias={"5": -100},
            allowed_token_ids=list(range(200)),
            bad_words=["the"],
        ),
    ),
    "echo with logprobs": (
        "/v1/completions",
        completion(["hello", "again"], max_tokens=8, seed=7, n=2, echo=True, logprobs=2),
    ),
    "echo alone": (
        "/v1/completions",
        completion("hello", max_tokens=0, echo=True, logprobs=2, prompt_logprobs=1),
    ),
    "a truncated prompt": (
        "/v1/completions",
        completion("hello again", max_tokens=8, seed=7, truncate_prompt_tokens=3, echo=True),
    ),
    "special tokens": (
        "/v1/chat/completions",
        chat("hello", max_tokens=30, seed=7, ignore_eos=True, skip_special_tokens=False),
    ),
}


@pytest.mark.parametrize("what", BODIES)
async def test_the_answer_is_that_of_the_replica_field_for_field(what: str) -> None:
    path, body = BODIES[what]
    async with gateway_over_real_replica() as (running, replica):
        status, through, _ = await running.post(path, body)
        assert status == 200
        # The gateway salts, so the direct call finds nothing cached either.
        auth = {"Authorization": f"Bearer {TOKEN}"}
        _, direct = await replica.post(path, body, **auth)
        for answer in (through, direct):
            del answer["id"], answer["created"]
        assert through == direct


async def test_the_engine_is_idle_one_second_after_a_client_hung_up() -> None:
    async with gateway_over_real_replica() as (running, replica):
        response = await running.session.post(
            running.url + "/v1/chat/completions",
            json=chat("hello", stream=True, ignore_eos=True, max_tokens=400),
            headers={"authorization": f"Bearer {ACME_KEY}"},
        )
        await response.content.readany()
        response.close()
        await until(lambda: replica.num_free_blocks == NUM_BLOCKS - 1, seconds=1.0)
        await running.nothing_runs()


async def test_a_replica_asked_without_the_internal_token_answers_401() -> None:
    async with gateway_over_real_replica() as (_, replica):
        status, answer = await replica.post("/v1/chat/completions", chat("hello"))
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_forty_requests_at_once_are_all_answered() -> None:
    async with gateway_over_real_replica() as (running, _):
        answers = await asyncio.gather(
            *(
                running.post("/v1/completions", completion(f"prompt {i}", max_tokens=8))
                for i in range(40)
            )
        )
        assert {status for status, _, _ in answers} == {200}
        await running.nothing_runs()


async def test_the_gateway_tokenizes_as_its_replica_does() -> None:
    async with gateway_over_real_replica() as (running, replica):
        for body in (
            {"prompt": "the lorem", "return_token_strs": True},
            {"messages": [{"role": "user", "content": "hello"}]},
        ):
            status, answer, _ = await running.post("/tokenize", body)
            own = await replica.post("/tokenize", body, Authorization=f"Bearer {TOKEN}")
            assert (status, answer) == own
        status, back, _ = await running.post("/detokenize", {"tokens": answer["tokens"]})
        assert status == 200
        assert "hello" in back["prompt"]
        status, error, _ = await running.post("/tokenize", {"prompt": "x", "model": "other"})
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        status, error, _ = await running.post("/tokenize", {"prompt": "x"}, key="sk-wrong")
        assert status == 401
        status, error, _ = await running.post("/detokenize", {"tokens": [10**9]})
        assert (status, error["error"]["param"]) == (400, "tokens[0]")

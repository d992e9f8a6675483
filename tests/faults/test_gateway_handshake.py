"""Replicas that disagree with their pool are refused, in words that name both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.frontend.parse import parse_chat_request
from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import SystemClock
from kvindex.hashing import HashScheme, known_answer
from tests.conditions import until
from tests.router.fake_replica import BUNDLE, IDENTITY, FakeReplica
from tests.router.running_gateway import Running, chat, running_gateway


def with_scheme(**fields: Any) -> dict[str, Any]:
    """Return the record fields of a replica that hashes otherwise, and does so rightly."""
    scheme = HashScheme(**fields)
    return {"hash_scheme": scheme, "known_answer": known_answer(scheme)}


def with_identity(**fields: Any) -> dict[str, Any]:
    """Return the record fields of a replica with another model identity."""
    return {"identity": msgspec.structs.replace(IDENTITY, **fields)}


WRONG: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "seed": (with_scheme(seed="0"), ("seed='0'", "seed='vllm-none-hash'")),
    "algorithm": (
        with_scheme(algorithm="sha256"),
        ("algorithm='sha256'", "algorithm='sha256_cbor'"),
    ),
    "block_size": (with_scheme(block_size=32), ("block_size=32", "block_size=16")),
    "tokenizer": (
        with_identity(tokenizer_digest="ab" * 32),
        ("tokenizer_digest='abab", f"tokenizer_digest='{IDENTITY.tokenizer_digest}'"),
    ),
    "template": (
        with_identity(template_digest="cd" * 32),
        ("template_digest='cdcd", f"template_digest='{IDENTITY.template_digest}'"),
    ),
    "hash_code": (
        {"known_answer": b"\x01" * 32},
        ("01" * 32, known_answer(HashScheme()).hex()),
    ),
}


async def refused(running: Running, changes: dict[str, Any]) -> str:
    """Add a replica with these changes and return why it was refused."""
    await running.add(FakeReplica("odd"), **changes)
    _, listed = await running.admin("/admin/replicas")
    (refusal,) = listed["refused"]
    assert refusal["replica"] == "odd"
    assert [replica["id"] for replica in listed["replicas"]] == ["r0"]
    reason: str = refusal["reason"]
    return reason


@pytest.mark.fault("router-14")
@pytest.mark.parametrize("what", WRONG)
async def test_each_of_the_six_preconditions_is_checked(what: str) -> None:
    changes, both_values = WRONG[what]
    async with running_gateway(replicas=1) as running:
        reason = await refused(running, changes)
        assert all(value in reason for value in both_values), reason
        for _ in range(4):
            status, _, headers = await running.post("/v1/chat/completions", chat("hello"))
            assert (status, headers["x-prefixfleet-replica"]) == (200, "r0")
        _, metrics = await running.admin("/metrics")
        assert 'prefixfleet_refused_replicas_total{replica="odd"} 1.0' in metrics


@pytest.mark.fault("router-15")
async def test_a_block_size_that_becomes_known_at_run_time_is_refused_not_guessed() -> None:
    async with running_gateway(replicas=1) as running:
        reason = await refused(running, with_scheme(block_size=1056))
        assert "block_size=1056" in reason
        assert "block_size=16" in reason


@pytest.mark.fault("router-14")
async def test_a_replica_that_comes_back_changed_is_put_out_and_its_repair_lets_it_in() -> None:
    async with running_gateway(replicas=2) as running:
        wrong = await running.register(running.replicas[1], **with_identity(revision="other"))
        await until(lambda: running.knows(wrong))
        assert [replica.id for replica in running.gateway.view.replicas] == ["r0"]
        right = await running.register(running.replicas[1])
        await until(lambda: running.knows(right))
        assert [replica.id for replica in running.gateway.view.replicas] == ["r0", "r1"]
        assert running.gateway.view.refusals == []


@pytest.mark.fault("router-13")
async def test_the_gateways_token_ids_are_those_of_the_replicas_own_encoder() -> None:
    body = chat('quotes " and \\ backslashes, ünïcode, and {"json": "twice"}')
    encoder = PromptEncoder(BUNDLE, clock=SystemClock(), max_model_len=512)
    async with running_gateway(replicas=1) as running:
        for _ in range(2):
            _, answer, headers = await running.post("/v1/chat/completions", body)
        sent = running.replicas[0].bodies[-1]["prefixfleet"]["prompt_token_ids"]
        assert sent == encoder.chat(parse_chat_request(msgspec.json.encode(body)))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(sent) - 1) // 16 * 16 > 0
        assert headers["x-prefixfleet-cached-tokens-predicted"] == str(cached)

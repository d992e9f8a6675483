"""Tool calls and structured output through the gateway: whole, streamed, and across a death."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from engine.frontend.message_sum import MessageSum
from engine.frontend.openai import ChatDelta
from tests.conditions import until
from tests.router.fake_replica import TOKEN
from tests.router.running_gateway import ACME_KEY, Running, chat
from tests.router.test_gateway_real_replica import gateway_over_real_replica
from tests.router.test_resume import fleet

LONG_NAME = {"type": "object", "properties": {"name": {"const": "x" * 40}}, "required": ["name"]}
NAMED = {**LONG_NAME, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NAMED}}]
CALLS = chat("call", seed=5, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
FORM = chat(
    "fill in",
    seed=6,
    response_format={"type": "json_schema", "json_schema": {"name": "form", "schema": NAMED}},
)
PATH = "/v1/chat/completions"


def without_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return message


async def stream(running: Running, body: dict[str, Any]) -> tuple[dict[str, Any], str, int]:
    """Read a stream: its message without ids, how it ended, how many ids its calls had."""
    total, finish, num_ids = MessageSum(), "", 0
    headers = {"authorization": f"Bearer {ACME_KEY}"}
    asked = {**body, "stream": True}
    async with running.session.post(running.url + PATH, json=asked, headers=headers) as response:
        text = await response.text()
    for data in (part[6:] for part in text.split("\n\n") if part.startswith("data: {")):
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        assert "prefixfleet" not in chunk
        (choice,) = chunk["choices"]
        total.add(msgspec.convert(choice["delta"], ChatDelta))
        num_ids += sum("id" in call for call in choice["delta"].get("tool_calls", []))
        finish = choice["finish_reason"] or finish
    message = json.loads(msgspec.json.encode(total.message()))
    return without_call_ids(message), finish, num_ids


@pytest.mark.parametrize("body", [CALLS, FORM], ids=["calls", "form"])
async def test_the_answer_is_that_of_the_replica(body: dict[str, Any]) -> None:
    async with gateway_over_real_replica() as (running, replica):
        status, through, _ = await running.post(PATH, body)
        assert status == 200, through
        _, direct = await replica.post(PATH, body, Authorization=f"Bearer {TOKEN}")
        for answer in (through, direct):
            del answer["id"], answer["created"]
            without_call_ids(answer["choices"][0]["message"])
        assert through == direct
        message, finish, num_ids = await stream(running, body)
        (choice,) = direct["choices"]
        assert (message, finish) == (choice["message"], choice["finish_reason"])
        assert num_ids == len(message.get("tool_calls", []))


async def test_a_grammar_that_cannot_be_compiled_is_refused_through_the_gateway() -> None:
    async with gateway_over_real_replica() as (running, _):
        client = running.client()
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objct"}},
                },
            )
        assert refused.value.param == "response_format.json_schema.schema"
        await running.nothing_runs()


@pytest.mark.parametrize("body", [CALLS, FORM], ids=["calls", "form"])
@pytest.mark.parametrize("after_bytes", [1_000, 4_000, 8_000])
async def test_a_call_goes_on_in_its_grammar_when_its_replica_dies(
    body: dict[str, Any], after_bytes: int
) -> None:
    async with fleet() as undisturbed:
        expected = await stream(undisturbed.running, body)
    async with fleet() as disturbed:
        disturbed.cables[0].cut_after_bytes = disturbed.cables[0].num_bytes + after_bytes
        assert await stream(disturbed.running, body) == expected
        _, metrics = await disturbed.running.admin("/metrics")
        assert 'prefixfleet_resumed_requests_total{replica="r1"}' in metrics
        await disturbed.running.nothing_runs()
        await until(lambda: all(replica.is_idle for replica in disturbed.replicas))

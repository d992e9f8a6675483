"""Structured output over HTTP: what is asked for is what comes, and what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest

from tests.worker.server.replica import RunningReplica, official_client, running_replica

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "hello"}]


class City(pydantic.BaseModel):
    """What the official client's `parse` wants."""

    warm: bool


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica() as running:
        yield running


async def ask(replica: RunningReplica, path: str = "chat/completions", **fields: Any) -> Any:
    asked = {"messages": HELLO} if path.startswith("chat") else {"prompt": "hello"}
    _, answer = await replica.post(f"/v1/{path}", {"model": "tiny", **asked, **fields})
    return answer


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def test_a_json_schema_is_kept_by_every_choice(replica: RunningReplica) -> None:
    answer = await ask(replica, response_format=json_schema(CITY), n=8, seed=3, max_tokens=200)
    said = [json.loads(choice["message"]["content"]) for choice in answer["choices"]]
    assert {found["city"] for found in said} == {"Rome", "Oslo"}
    assert {type(found["warm"]) for found in said} == {bool}
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["sun", "rain"]}}, {"sun", "rain"}),
        ({"guided_choice": ["sun", "rain"]}, {"sun", "rain"}),
        ({"structured_outputs": {"regex": "[ab]"}}, {"a", "b"}),
        ({"guided_regex": "[ab]"}, {"a", "b"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        (
            {"structured_outputs": {"json": '{"enum": [[1], 2]}', "disable_any_whitespace": True}},
            {"[1]", "2"},
        ),
    ],
)
async def test_every_field_that_rules_the_output_holds_for_chats_and_completions(
    replica: RunningReplica, fields: dict[str, Any], texts: set[str]
) -> None:
    chat = await ask(replica, **fields, n=12, seed=3)
    assert {choice["message"]["content"] for choice in chat["choices"]} == texts
    plain = await ask(replica, "completions", **fields, n=12, seed=3)
    assert {choice["text"] for choice in plain["choices"]} == texts


@pytest.mark.fault("engine-33")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": json_schema({"type": "objct"})},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
        ),
    ],
)
async def test_a_malformed_grammar_is_refused_by_its_field_and_hurts_nobody_else(
    replica: RunningReplica, fields: dict[str, Any], param: str
) -> None:
    for _ in range(2):
        answer = await ask(replica, **fields)
        assert (answer["error"]["type"], answer["error"]["param"]) == (
            "invalid_request_error",
            param,
        )
    fine = await ask(replica, structured_outputs={"choice": ["fine"]})
    assert fine["choices"][0]["message"]["content"] == "fine"
    assert replica.is_idle


async def test_a_stream_adds_up_to_the_whole_answer(replica: RunningReplica) -> None:
    async with official_client(replica) as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": HELLO,
            "response_format": json_schema(CITY),
            "seed": 3,
        }
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert len(deltas) > 5
    assert "".join(deltas) == whole.choices[0].message.content


async def test_the_official_client_parses_what_it_asked_for(replica: RunningReplica) -> None:
    async with official_client(replica) as client:
        answer = await client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            response_format=City,
        )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert isinstance(parsed.warm, bool)


async def test_what_is_cut_at_max_tokens_is_the_beginning_of_what_was_asked_for(
    replica: RunningReplica,
) -> None:
    answer = await ask(replica, structured_outputs={"choice": ["abcdef"]}, max_tokens=3)
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")

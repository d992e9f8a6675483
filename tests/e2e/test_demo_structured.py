"""Tools and JSON schemas on the demo's model, by OpenAI's own client: gateway and replica alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.fleet_process import FleetProcess
from tests.e2e.openai_clients import openai_clients
from tests.e2e.test_demo import demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "celsius": {"type": "integer"}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "report", "description": "Report weather", "parameters": WEATHER},
    }
]
ASKED: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "It is 22 degrees in Paris. Report that."}],
    "max_tokens": 90,
    "temperature": 0,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    running = demo(tmp_path_factory.mktemp("demo")).start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def clients(fleet: FleetProcess) -> Iterator[list[openai.OpenAI]]:
    with openai_clients(fleet) as both:
        yield both


def test_a_json_schema_is_kept_whole_and_streamed(clients: list[openai.OpenAI]) -> None:
    texts = set()
    for client in clients:
        whole = client.chat.completions.create(**ASKED, response_format=FORM)
        stream = client.chat.completions.create(**ASKED, response_format=FORM, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        texts |= {whole.choices[0].message.content or "", streamed}
        assert whole.choices[0].finish_reason == "stop"
    (text,) = texts
    found = json.loads(text)
    assert found.keys() == WEATHER["properties"].keys()
    assert isinstance(found["celsius"], int)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "report"}}]
)
def test_a_demanded_call_is_valid_and_can_be_answered(
    clients: list[openai.OpenAI], choice: Any
) -> None:
    called = set()
    for client in clients:
        asked = {**ASKED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "report"
        assert json.loads(call.function.arguments).keys() == WEATHER["properties"].keys()
        called.add(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        followed = [*ASKED["messages"], answer.message.model_dump(exclude_none=True), result]
        closing = client.chat.completions.create(
            **{**ASKED, "messages": followed, "tools": TOOLS, "max_tokens": 8}
        )
        assert closing.choices[0].message.content
    assert len(called) == 1


def test_a_stream_of_a_call_has_openais_shape(clients: list[openai.OpenAI]) -> None:
    for client in clients:
        stream = client.chat.completions.create(
            **ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
        )
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
        assert parts[0].function is not None
        assert parts[0].function.name == "report"
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
        assert json.loads(arguments).keys() == WEATHER["properties"].keys()
        assert chunks[-1].finish_reason == "tool_calls"


def test_a_schema_that_cannot_be_honoured_is_refused_by_its_field(
    clients: list[openai.OpenAI],
) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}
    for client in clients:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASKED, response_format=bad)
        assert refused.value.param == "response_format.json_schema.schema"

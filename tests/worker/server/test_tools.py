"""Tool calls over HTTP, through the official client: offered, demanded, streamed, answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from tests.engine.frontend.tiny_tokenizer import CHAT_TEMPLATE, tiny_bundle
from tests.worker.server.replica import official_client
from tests.worker.server.speaker import running_speaker

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES = CHAT_TEMPLATE + "{# tools: <tool_call> #}"
MISTRAL = CHAT_TEMPLATE + "{# tools: [TOOL_CALLS] #}"
LLAMA = CHAT_TEMPLATE + '{# tools: "parameters": #}'


def saying(text: str, **fields: Any) -> dict[str, Any]:
    """A chat in which the model wants to say a text."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"say:{text}"}],
        "tools": [WEATHER, TIME],
        **fields,
    }


async def test_a_call_that_the_model_chooses_is_no_content() -> None:
    bundle = tiny_bundle(template=HERMES, marks=("<tool_call>", "</tool_call>"))
    async with running_speaker(bundle) as replica, official_client(replica) as client:
        answer = await client.chat.completions.create(**saying("I look it up.\n" + CALL))
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up."
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "special", "text"),
    [
        (HERMES, (), CALL),
        (
            MISTRAL,
            ("[TOOL_CALLS]",),
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
        ),
        (LLAMA, ("<|python_tag|>",), '{"name": "weather", "parameters": {"city": "Oslo"}}'),
    ],
    ids=["hermes", "mistral", "llama3_json"],
)
async def test_the_template_tells_how_a_model_writes_its_calls(
    template: str, special: tuple[str, ...], text: str
) -> None:
    bundle = tiny_bundle(template=template, special_marks=special)
    async with running_speaker(bundle) as replica:
        for choice in ("auto", "required"):
            body = saying(text, tool_choice=choice)
            _, answer = await replica.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            assert message["content"] is None
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


async def test_a_stream_brings_the_name_once_and_adds_up_to_the_whole_answer() -> None:
    bundle = tiny_bundle(template=HERMES, marks=("<tool_call>",))
    async with running_speaker(bundle) as replica, official_client(replica) as client:
        asked = saying("Well.\n" + CALL + "\n" + CALL)
        whole = (await client.chat.completions.create(**asked)).choices[0]
        stream = await client.chat.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    assert (content, chunks[-1].finish_reason) == (whole.message.content, "tool_calls")
    for index, call in enumerate(whole.message.tool_calls or []):
        own = [part for part in parts if part.index == index]
        assert [part.function.name for part in own if part.function and part.function.name] == [
            "weather"
        ]
        # Ids name the request, so those of two requests differ.
        assert [part.id is not None for part in own] == [True] + [False] * (len(own) - 1)
        arguments = "".join(part.function.arguments or "" for part in own if part.function)
        assert call.type == "function"
        assert arguments == call.function.arguments == '{"city": "Oslo"}'
        assert len(own) > 5
    assert {part.index for part in parts} == {0, 1}


@pytest.mark.parametrize(
    ("choice", "wish", "names"),
    [
        ("required", "I would rather talk", {"weather", "time"}),
        ("required", CALL, {"weather"}),
        ({"type": "function", "function": {"name": "time"}}, CALL, {"time"}),
        ({"type": "function", "function": {"name": "weather"}}, "no", {"weather"}),
    ],
)
async def test_a_demanded_call_is_always_valid_whatever_the_model_wants(
    choice: Any, wish: str, names: set[str]
) -> None:
    bundle = tiny_bundle(template=HERMES, marks=("<tool_call>", "</tool_call>"))
    async with running_speaker(bundle) as replica:
        body = saying(wish, tool_choice=choice, parallel_tool_calls=False)
        _, answer = await replica.post("/v1/chat/completions", body)
    (found,) = answer["choices"]
    (call,) = found["message"]["tool_calls"]
    assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
    else:
        assert arguments == {}


async def test_without_parallel_calls_only_the_first_is_shown() -> None:
    async with running_speaker(tiny_bundle(template=HERMES)) as replica:
        body = saying(f"{CALL}\n{CALL}", parallel_tool_calls=False)
        _, answer = await replica.post("/v1/chat/completions", body)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_with_tools_that_may_not_be_called_everything_is_content() -> None:
    async with running_speaker(tiny_bundle(template=HERMES)) as replica:
        for fields in ({"tool_choice": "none"}, {"tools": None}):
            _, answer = await replica.post("/v1/chat/completions", saying(CALL, **fields))
            (choice,) = answer["choices"]
            assert choice["message"] == {"content": CALL, "role": "assistant", "refusal": None}
            assert choice["finish_reason"] == "stop"


async def test_an_answer_in_json_may_take_the_place_of_a_call() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["no"]}}}
    async with running_speaker(tiny_bundle(template=HERMES)) as replica:
        for wish, content, num_calls in ((CALL, None, 1), ('"no"', '"no"', 0)):
            _, answer = await replica.post(
                "/v1/chat/completions", saying(wish, response_format=schema)
            )
            message = answer["choices"][0]["message"]
            assert message["content"] == content
            assert len(message.get("tool_calls", [])) == num_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
                ],
            },
            "tools",
        ),
    ],
)
async def test_tools_that_cannot_be_honoured_are_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    async with running_speaker(tiny_bundle(template=HERMES)) as replica:
        status, answer = await replica.post("/v1/chat/completions", saying("x", **fields))
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_parser_can_be_named_and_one_that_does_not_exist_is_refused() -> None:
    text = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    bundle = tiny_bundle(template=HERMES)
    async with running_speaker(bundle, tool_call_parser="llama3_json") as replica:
        _, answer = await replica.post("/v1/chat/completions", saying(text))
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    with pytest.raises(ConfigError, match="tool_call_parser is 'nobody'; use one of hermes"):
        async with running_speaker(bundle, tool_call_parser="nobody"):
            pass


async def test_responses_call_tools_and_keep_to_a_format_as_well() -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["no"]}}}
    async with (
        running_speaker(tiny_bundle(template=HERMES)) as replica,
        official_client(replica) as client,
    ):
        called = await client.responses.create(model="tiny", input=f"say:{CALL}", tools=[tool])
        shaped = await client.responses.create(model="tiny", input="say:x", text=form)
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    assert shaped.output_text == '"no"'

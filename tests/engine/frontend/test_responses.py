"""Responses as chat completions, and chat chunks as the events of a response."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request
from engine.frontend.responses_answer import ResponseStream, whole_response
from engine.frontend.responses_request import (
    ResponsesRequest,
    as_responses_error,
    parse_responses_request,
)
from engine.frontend.sse import SseParser
from kvindex.foundation.errors import WireError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def asked(**fields: Any) -> ResponsesRequest:
    return parse_responses_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def chat_of(**fields: Any) -> dict[str, Any]:
    chat: dict[str, Any] = msgspec.json.decode(asked(**fields).chat)
    return chat


def refusal(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    return caught.value.param, caught.value.message


def chunk(**choice: Any) -> bytes:
    usage = choice.pop("usage", None)
    choices = [{"index": 0, "delta": {}, **choice}] if choice else []
    return json.dumps(
        {"id": "chatcmpl-7", "created": 9, "model": "m", "choices": choices, "usage": usage}
    ).encode()


def events_of(stream: ResponseStream, *chunks: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream; the official client's types accept each of them."""
    sent = b"".join([*map(stream.take, chunks), stream.end()])
    parsed = SseParser().feed(sent)
    events = [msgspec.json.decode(event.data) for event in parsed]
    assert [event.event for event in parsed] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def test_a_text_input_is_one_turn_after_the_instructions() -> None:
    chat = chat_of(instructions="be brief", max_output_tokens=5, temperature=0, seed=3)
    assert chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "max_completion_tokens": 5,
        "temperature": 0,
        "seed": 3,
    }
    assert parse_chat_request(asked(max_output_tokens=5).chat).max_completion_tokens == 5


def test_items_become_messages_and_calls_join_the_turn_that_made_them() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": "let me look"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
    ]
    user, assistant, first, second = chat_of(input=items)["messages"]
    assert user == {"role": "user", "content": "a"}
    assert assistant["content"] == "let me look"
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert first == {"role": "tool", "tool_call_id": "1", "content": "x"}
    assert second == {"role": "tool", "tool_call_id": "2", "content": "y"}


def test_tools_and_formats_take_the_shape_of_chat() -> None:
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    chat = chat_of(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", **schema}},
    )
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object"}, "strict": True},
        }
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)[0] == param


def test_errors_of_the_chat_completion_name_what_the_client_sent() -> None:
    error = RequestError(
        "invalid_request", "max_completion_tokens: too many", param="max_completion_tokens"
    )
    shown = as_responses_error(error)
    assert (shown.param, shown.message) == ("max_output_tokens", "max_output_tokens: too many")
    error = RequestError("invalid_request", "messages[0].content: bad", param="messages[0].content")
    assert as_responses_error(error).param == "input"


def test_text_comes_as_one_message_that_grows() -> None:
    events = events_of(
        ResponseStream(asked()),
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"content": "Hel"}),
        chunk(delta={"content": "lo"}, finish_reason="stop"),
        chunk(usage=USAGE),
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    response = Response.model_validate(events[-1]["response"])
    assert response.output_text == "Hello"
    assert (response.id, response.status) == ("resp_7", "completed")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.total_tokens == 7


def test_logprobs_of_half_a_character_are_kept() -> None:
    entry = {"token": "x", "logprob": -1.0, "bytes": [195], "top_logprobs": []}
    request = asked(include=["message.output_text.logprobs"])
    events = events_of(
        ResponseStream(request),
        chunk(delta={"content": ""}, logprobs={"content": [entry]}),
        chunk(delta={"content": "é"}, logprobs={"content": [entry]}, finish_reason="stop"),
    )
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == ("é", [entry, entry])


def test_an_answer_that_was_cut_is_incomplete() -> None:
    events = events_of(
        ResponseStream(asked(max_output_tokens=1)),
        chunk(delta={"content": "Hel"}, finish_reason="length"),
    )
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":1}'}}
    other = {"index": 1, "id": "call_2", "function": {"name": "look", "arguments": "{}"}}
    events = events_of(
        ResponseStream(asked(tools=[TOOL])),
        chunk(delta={"reasoning_content": "hm"}),
        chunk(delta={"content": "I look."}),
        chunk(delta={"tool_calls": [call]}),
        chunk(delta={"tool_calls": [more]}),
        chunk(delta={"tool_calls": [other]}, finish_reason="tool_calls"),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [(i["call_id"], i["arguments"]) for i in output[2:]] == [
        ("call_1", '{"a":1}'),
        ("call_2", "{}"),
    ]
    assert len({item["id"] for item in output}) == 4


def test_the_whole_answer_is_what_the_stream_ends_with() -> None:
    request = asked(tools=[TOOL])
    calls = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    whole = chunk(message={"content": "I look.", "tool_calls": calls}, finish_reason="tool_calls")
    streamed = events_of(
        ResponseStream(request),
        chunk(delta={"content": "I look."}),
        chunk(delta={"tool_calls": [{"index": 0, **calls[0]}]}, finish_reason="tool_calls"),
    )
    assert msgspec.json.decode(whole_response(request, whole)) == streamed[-1]["response"]


def test_a_stream_that_cannot_go_on_says_so_in_its_own_events() -> None:
    stream = ResponseStream(asked())
    stream.take(chunk(delta={"content": "Hel"}))
    failed = SseParser().feed(stream.fail(RequestError("replica_lost", "the replica is gone")))
    error, response = (msgspec.json.decode(event.data) for event in failed)
    EVENT.validate_python(error)
    assert error["message"] == "the replica is gone"
    assert response["response"]["status"] == "failed"
    assert response["response"]["error"]["code"] == "replica_lost"


def test_what_is_no_chunk_is_an_error_of_the_stream() -> None:
    with pytest.raises(WireError, match="chat chunk"):
        ResponseStream(asked()).take(b'{"id": 3}')

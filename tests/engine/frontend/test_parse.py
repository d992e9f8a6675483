"""What a body must look like, and what a client is told when it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request, parse_completion_request

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi"} | fields).encode()


def refusal(body: bytes) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        parse_chat_request(body)
    assert caught.value.kind == "invalid_request"
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; a JSON object is needed"),
        (b"{", "the body is not valid JSON: Input data was truncated"),
        (b"[1]", "the body must be a JSON object, got list"),
        (b"null", "the body must be a JSON object, got null"),
        (b'{"a":' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    assert refusal(body) == (None, message)


def test_bytes_that_are_no_utf8_are_refused() -> None:
    param, message = refusal(b'{"model":"\xff"}')
    assert param is None
    assert message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "must hold at least one message"),
        ({"messages": None}, "messages", "is required"),
        ({"model": 3}, "model", "expected str but got int"),
        ({"messages": [{"role": 1}]}, "messages[0].role", "expected str but got int"),
        ({"messages": [{}]}, "messages[0].role", "is required"),
        ({"max_tokens": "5"}, "max_tokens", "expected int | null but got str"),
        ({"max_tokens": True}, "max_tokens", "expected int | null but got bool"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "must be at least 1, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must be at most max_tokens=8"),
        ({"n": 0}, "n", "must be between 1 and 128, got 0"),
        ({"n": 129}, "n", "must be between 1 and 128, got 129"),
        ({"temperature": 2.5}, "temperature", "must be between 0 and 2, got 2.5"),
        ({"temperature": -0.1}, "temperature", "must be between 0 and 2, got -0.1"),
        ({"top_p": 0}, "top_p", "must be above 0 and at most 1, got 0.0"),
        ({"top_k": -2}, "top_k", "must be between -1 and 2147483647, got -2"),
        ({"stop": ""}, "stop", "must have 1 to 1024 characters"),
        ({"stop": ["a", ""]}, "stop[1]", "must have 1 to 1024 characters"),
        ({"stop": ["x"] * 65}, "stop", "may hold at most 64 strings, got 65"),
        ({"min_p": 1.5}, "min_p", "must be between 0 and 1, got 1.5"),
        ({"presence_penalty": 2.1}, "presence_penalty", "must be between -2 and 2, got 2.1"),
        ({"frequency_penalty": -3}, "frequency_penalty", "must be between -2 and 2, got -3.0"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty",
            "must be above 0 and at most 10, got 0.0",
        ),
        (
            {"logit_bias": {"7": 100.5}},
            "logit_bias.7",
            "must be between -100 and 100, got 100.5",
        ),
        ({"logit_bias": {"the": 1}}, "logit_bias.the", "is not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "is not a token id"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05", "is not a token id"),
        ({"bad_words": ["a", " "]}, "bad_words[1]", "must have 1 to 256 characters"),
        ({"bad_words": ["a"] * 65}, "bad_words", "may hold at most 64 words, got 65"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "must be between 0 and 20, got 21",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs: true`"),
        ({"logprobs": 2}, "logprobs", "expected bool but got int"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be between 0 and 20, got -1"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "must be at least 1, or -1, got 0",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "needs `include_usage: true`",
        ),
        ({"echo": True}, "echo", "is not supported here; leave it out"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream: true`"),
        ({"temprature": 1}, "temprature", "is not a known field; did you mean `temperature`?"),
        ({"qqqq": 1}, "qqqq", "is not a known field"),
        (
            {"prefixfleet": {"request_id": "a", "x": 1}},
            "prefixfleet",
            "object contains unknown field x",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
            "is required",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_reason(
    fields: dict[str, Any], param: str, message: str
) -> None:
    assert refusal(chat(**fields)) == (param, f"{param}: {message}")


@pytest.mark.fault("engine-13")
@pytest.mark.parametrize("salt", ["", "s" * 1025])
def test_an_empty_or_oversized_cache_salt_is_refused(salt: str) -> None:
    message = "cache_salt: must have 1 to 1024 characters"
    assert refusal(chat(cache_salt=salt)) == ("cache_salt", message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("functions", [{"name": "f"}]),
        ("best_of", 2),
        ("suffix", "end"),
        ("chat_template", "x"),
    ],
)
def test_what_would_change_the_answer_is_refused_and_never_ignored(name: str, value: Any) -> None:
    message = f"{name}: is not supported here; leave it out"
    assert refusal(chat(**{name: value})) == (name, message)


def test_harmless_and_neutral_fields_are_accepted() -> None:
    request = parse_chat_request(
        chat(
            user="u",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            prompt_cache_key="session",
            priority=1,
            logprobs=False,
            top_logprobs=None,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            frequency_penalty=0,
            presence_penalty=0.0,
            logit_bias={},
            temperature=None,
            stop=None,
        )
    )
    assert (request.user, request.prompt_cache_key, request.service_tier) == (
        "u",
        "session",
        "auto",
    )
    assert request.temperature is None


def test_what_routers_of_the_sglang_family_add_to_a_body_is_accepted() -> None:
    shared = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
    }
    chats_only = {
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
    }
    parse_chat_request(chat(logprobs=False, **shared, **chats_only))
    parse_completion_request(completion(echo=False, **shared))


def test_an_echo_alone_needs_no_output_token() -> None:
    request = parse_completion_request(completion(max_tokens=0, echo=True, best_of=1))
    assert request.is_echo_only
    assert not parse_completion_request(completion(max_tokens=1, echo=True)).is_echo_only


def test_one_prompt_and_several_have_one_form() -> None:
    def prompts(prompt: Any) -> Any:
        return parse_completion_request(completion(prompt=prompt)).prompts

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [1, "a"]}, "prompt[1]", "mixes texts, token ids and lists of token ids"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "prompts times n may be at most 128, got 130"),
        ({"prompt": None}, "prompt", "is required"),
        ({"logprobs": 21}, "logprobs", "must be between 0 and 20, got 21"),
        ({"logprobs": True}, "logprobs", "expected int | null but got bool"),
        ({"top_logprobs": 3}, "top_logprobs", "is not supported here; leave it out"),
        ({"best_of": 2}, "best_of", "must be n=1: choices are not ranked here"),
        ({"suffix": "end"}, "suffix", "is not supported here; leave it out"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, got 0"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion_request(completion(**fields))
    assert (caught.value.param, caught.value.message) == (param, f"{param}: {message}")

"""How a model thinks and calls: chosen by name or template, and what follows for one chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.frontend.dialect import Conversation, Dialect
from engine.frontend.encoder import Encoder
from engine.frontend.message_fold import CallIds
from engine.frontend.parse import parse_chat_request
from engine.frontend.sampling_params import SamplingParams, ThinkingSpan
from kvindex.foundation.errors import ConfigError
from tests.engine.frontend.tiny_tokenizer import tiny_bundle

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ENCODER = Encoder(tiny_bundle(marks=MARKS))
PLAIN = Encoder(tiny_bundle())
THINKS = "{{ '<think>' }} … {{ '</think>' }}"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def conversation(
    dialect: Dialect, *, encoder: Encoder = ENCODER, prompt: str = "hi", **fields: Any
) -> Conversation:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    ids = encoder.encode(prompt, add_special_tokens=False)
    return dialect.conversation(parse_chat_request(json.dumps(body).encode()), ids)


@pytest.mark.parametrize(
    ("template", "name", "begin"),
    [
        ("", None, "<tool_call>"),
        ("{{ '<tool_call>' }}", None, "<tool_call>"),
        ("{{ '[TOOL_CALLS]' }}", None, ""),
        ("{{ '<tool_call>' }}", "mistral", ""),
    ],
)
def test_the_family_of_calls_is_that_of_the_template_unless_it_is_named(
    template: str, name: str | None, begin: str
) -> None:
    assert Dialect(ENCODER, template, tool_call_parser=name).tool_family.begin == begin


def test_a_family_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermees'; use one of hermes"):
        Dialect(ENCODER, None, tool_call_parser="hermees")
    with pytest.raises(ConfigError, match="reasoning_parser is 'qwen'; use one of"):
        Dialect(ENCODER, None, reasoning_parser="qwen")


def test_without_tools_formats_or_thinking_a_chat_is_sampled_as_asked() -> None:
    chat = conversation(Dialect(ENCODER, ""))
    asked = SamplingParams(temperature=0.5)
    assert chat.grammar is None
    assert chat.params(asked) == asked
    fold = chat.fold(CallIds("r", 0))
    assert chat.num_reasoning_tokens([1, 2], fold) is None


def test_a_demanded_call_is_a_grammar_and_a_free_one_is_not() -> None:
    dialect = Dialect(ENCODER, "")
    free = conversation(dialect, tools=[TOOL])
    assert free.grammar is None
    demanded = conversation(dialect, tools=[TOOL], tool_choice="required")
    assert demanded.grammar is not None
    assert (demanded.grammar.param, demanded.grammar.spec.kind) == ("tools", "tool_calls")
    either = conversation(dialect, tools=[TOOL], response_format=SCHEMA)
    assert either.grammar is not None
    assert '"otherwise":{"type":"object"' in either.grammar.spec.text


def test_a_grammar_begins_after_the_thinking() -> None:
    dialect = Dialect(ENCODER, THINKS)
    end, begin = ENCODER.token_id("</think>"), ENCODER.token_id("<think>")
    assert end is not None
    may_think = conversation(dialect, response_format=SCHEMA)
    assert may_think.grammar is not None
    assert may_think.grammar.spec.thinking == ThinkingSpan(end, begin)
    opened = conversation(dialect, prompt="hi<think>", response_format=SCHEMA)
    assert opened.grammar is not None
    assert opened.grammar.spec.thinking == ThinkingSpan(end)


def test_thinking_is_counted_between_its_marks() -> None:
    dialect = Dialect(ENCODER, THINKS)
    chat = conversation(dialect)
    text = "<think>abc</think>done"
    ids = ENCODER.encode(text, add_special_tokens=False)
    fold = chat.fold(CallIds("r", 0))
    assert chat.num_reasoning_tokens(ids, fold) == len(
        ENCODER.encode("abc", add_special_tokens=False)
    )
    assert chat.num_reasoning_tokens(ids[-2:], fold) == 0  # It did not think.
    opened = conversation(dialect, prompt="hi<think>")
    assert opened.num_reasoning_tokens(ids[1:4], opened.fold(CallIds("r", 0))) == 3


def test_where_marks_are_no_tokens_a_grammar_leaves_thinking_out() -> None:
    dialect = Dialect(PLAIN, THINKS)
    chat = conversation(dialect, encoder=PLAIN, response_format=SCHEMA)
    assert chat.grammar is not None
    assert chat.grammar.spec.thinking is None
    assert chat.num_reasoning_tokens([1], chat.fold(CallIds("r", 0))) == 0


def test_marks_that_are_special_tokens_stay_in_the_text_for_their_reader() -> None:
    encoder = Encoder(tiny_bundle(marks=MARKS, special_marks=MARKS))
    dialect = Dialect(encoder, "")
    params = SamplingParams(skip_special_tokens=True)
    assert conversation(dialect, tools=[TOOL]).params(params).skip_special_tokens is False
    assert conversation(dialect).params(params).skip_special_tokens is True

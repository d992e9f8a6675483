"""Tool calls in a model's output: read as its family writes them, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.message_fold import CallIds, MessageFold
from engine.frontend.message_sum import MessageSum
from engine.frontend.openai import ChatDelta
from engine.frontend.tool_families import TOOL_FAMILIES

NAMES = ["f", "g"]


def fold_of(family: str, *, only_one_call: bool = False) -> MessageFold:
    parser = TOOL_FAMILIES[family].parser(NAMES)
    return MessageFold(CallIds("req", 0), tools=parser, only_one_call=only_one_call)


def read(family: str, text: str, **settings: bool) -> tuple[str | None, list[tuple[str, str]]]:
    """Content and calls of a whole text."""
    fold = fold_of(family, **settings)
    fold.push(text, is_last=True)
    message = fold.message()
    calls = message.tool_calls or []
    return message.content, [(call.function.name, call.function.arguments) for call in calls]


OUTPUTS: dict[str, dict[str, tuple[str | None, list[tuple[str, str]]]]] = {
    "hermes": {
        'See.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1]}}\n</tool_call>': (
            "See.",
            [("f", '{"a": "x}\\"", "b": [1]}')],
        ),
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g"}': (
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        '<tool_call>{"arguments": {"z" :1 }, "id": [{}], "name": "g"}</tool_call>': (
            None,
            [("g", '{"z" :1 }')],
        ),
        '<tool_call>{"name": "f"}</tool_call>\n\nand more  words\n': (
            "and more  words\n",
            [("f", "{}")],
        ),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': (
            None,
            [("f", '{"a": 1}')],
        ),
        '<tool_call>{"name": "f", "arguments": {"cut": "of': (None, [("f", '{"cut": "of')]),
        "plain text with <tool and  \n trailing \n": (
            "plain text with <tool and  \n trailing \n",
            [],
        ),
        "<tool_call>no object</tool_call> after": ("<tool_call>no object</tool_call> after", []),
        '<tool_call>{"name": 7, "arguments": {}}': ('<tool_call>{"name": 7, "arguments": {}}', []),
        "": ("", []),
    },
    "llama3_json": {
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}': (
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}': (None, [("f", '{"a": 1}')]),
        '{"name": "other", "parameters": {}} x': ('{"name": "other", "parameters": {}} x', []),
        ' {"city": [1, 2]} ': (' {"city": [1, 2]} ', []),
        'see {"name": "f"}': ('see {"name": "f"}', []),
    },
    "mistral": {
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]': (
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        'Ok [TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[ARGS]{}': (
            "Ok",
            [("f", '{"a": {"b": 1}}'), ("g", "{}")],
        ),
        "[TOOL] text": ("[TOOL] text", []),
        "[TOOL_CALLS] nothing": ("[TOOL_CALLS] nothing", []),
        '[TOOL_CALLS][{"name": 7}] x': ('[TOOL_CALLS][{"name": 7}] x', []),
    },
}
CASES = [(family, text) for family, outputs in OUTPUTS.items() for text in outputs]


@pytest.mark.parametrize(("family", "text"), CASES)
def test_text_and_calls_are_told_apart(family: str, text: str) -> None:
    assert read(family, text) == OUTPUTS[family][text]


@given(case=st.sampled_from(CASES), cuts=st.sets(st.integers(1, 90), max_size=12))
def test_it_does_not_matter_how_the_text_is_cut(case: tuple[str, str], cuts: set[int]) -> None:
    family, text = case
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    fold, total, start = fold_of(family), MessageSum(), 0
    for end in ends:
        total.add(fold.push(text[start:end], is_last=end == len(text)))
        start = end
    whole = fold_of(family)
    whole.push(text, is_last=True)
    assert total.message() == fold.message() == whole.message()


@pytest.mark.parametrize(("family", "text"), CASES)
def test_one_that_was_begun_elsewhere_says_only_what_follows(family: str, text: str) -> None:
    for cut in range(len(text)):
        first, second = fold_of(family), fold_of(family)
        total = MessageSum()
        total.add(first.push(text[:cut], is_last=False))
        second.push(text[:cut], is_last=False)
        total.add(second.push(text[cut:], is_last=True))
        assert total.message() == second.message()


def test_a_stream_names_a_call_once_and_then_brings_its_arguments() -> None:
    fold = fold_of("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"a": "bc"}}</tool_call>'
    deltas = [fold.push(char, is_last=False) for char in text]
    deltas = [delta for delta in deltas if delta != ChatDelta()]
    first, *others = [json.loads(msgspec.json.encode(delta)) for delta in deltas]
    assert first == {
        "tool_calls": [
            {
                "index": 0,
                "function": {"name": "f", "arguments": "{"},
                "id": "call_bcc776e0de21e149553ebc4e",
                "type": "function",
            }
        ]
    }
    assert [call_part(other) for other in others] == list('"a": "bc"}')


def call_part(delta: dict[str, Any]) -> str:
    (call,) = delta["tool_calls"]
    assert call.keys() == {"index", "function"}
    arguments: str = call["function"]["arguments"]
    return arguments


def test_only_the_first_call_counts_where_one_is_all_that_is_wanted() -> None:
    text = (
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
        '<tool_call>{"name":"g","arguments":{"b":2}}</tool_call>'
    )
    assert read("hermes", text, only_one_call=True) == (None, [("f", '{"a":1}')])


def test_call_ids_depend_on_request_choice_and_place_alone() -> None:
    ids = [CallIds("r", 0).of(0), CallIds("r", 0).of(1), CallIds("r", 1).of(0), CallIds("q", 0)]
    assert len(set(ids)) == 4
    assert CallIds("r", 0).of(1) == ids[1]
    assert len(CallIds("r", 0, num_chars=9).of(0)) == 9


def test_a_part_of_a_call_that_never_began_is_no_message() -> None:
    part = b'{"tool_calls": [{"index": 2, "function": {"arguments": "x"}}]}'
    with pytest.raises(ValueError, match="tool call 2, which has not begun"):
        MessageSum().add(msgspec.json.decode(part, type=ChatDelta))

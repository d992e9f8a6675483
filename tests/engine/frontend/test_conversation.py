"""Tools and calls in a conversation, as templates read them and as models without any are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request
from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import VirtualClock
from tests.engine.frontend.tiny_tokenizer import MAX_MODEL_LEN, tiny_bundle

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}},
}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4 °C"}]},
]
WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    prompts = PromptEncoder(
        tiny_bundle(template=template), clock=VirtualClock(), max_model_len=MAX_MODEL_LEN
    )
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    ids = prompts.chat(parse_chat_request(body))
    return prompts.encoder.decode(ids, skip_special_tokens=False)


def test_a_template_gets_tools_and_calls_as_transformers_gives_them() -> None:
    bundle = tiny_bundle(template=WITH_TOOLS)
    theirs = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_buffer(bundle.files["tokenizer.json"]),
        chat_template=WITH_TOOLS,
    )
    conversation = json.loads(json.dumps(ASKED))
    conversation[1]["content"] = ""
    conversation[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    conversation[2]["content"] = "4 °C"
    expected = theirs.apply_chat_template(conversation, tools=[TOOL], tokenize=False)
    assert rendered(WITH_TOOLS, ASKED, tools=[TOOL]) == expected
    assert 'weather({"city": "Oslo"})<tool c1>4 °C' in expected


def test_tools_that_may_not_be_called_are_not_shown_to_the_model() -> None:
    shown = rendered(WITH_TOOLS, ASKED[:1], tools=[TOOL], tool_choice="none")
    assert shown == rendered(WITH_TOOLS, ASKED[:1]) == "<user>Oslo?"


def test_settings_of_the_template_reach_it_and_cannot_replace_the_conversation() -> None:
    settings = {"enable_thinking": False, "messages": [], "tools": ["x"]}
    shown = rendered(WITH_TOOLS, ASKED[:1], chat_template_kwargs=settings)
    assert shown == "<user>Oslo?</think>"


def test_a_template_without_tools_is_told_everything_in_words() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    shown = rendered(template, [{"role": "system", "content": "Be brief."}, *ASKED], tools=[TOOL])
    assert shown == (
        "<system>Be brief.\n\nFunctions that you may call:\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "description": "é", '
        '"parameters": {"type": "object"}}}\n</tools>\n'
        "To call one, write its name and arguments between these marks:\n"
        '<tool_call>\n{"name": "...", "arguments": {}}\n</tool_call>'
        "<user>Oslo?"
        '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<user><tool_response>\n4 °C\n</tool_response>"
    )


def test_results_that_follow_each_other_are_one_turn() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    results = [{"role": "tool", "content": str(i)} for i in range(2)]
    shown = rendered(template, [*ASKED[:2], *results])
    assert shown.endswith(
        "<user><tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>"
    )


@pytest.mark.parametrize(
    ("arguments", "ok"), [("", True), ("{}", True), ("{", False), ("[1]", False), ("1", False)]
)
def test_arguments_that_are_sent_back_must_be_an_object(arguments: str, ok: bool) -> None:
    message = json.loads(json.dumps(ASKED[1]))
    message["tool_calls"][0]["function"]["arguments"] = arguments
    if ok:
        assert "weather({})" in rendered(WITH_TOOLS, [message])
        return
    with pytest.raises(RequestError) as refused:
        rendered(WITH_TOOLS, [message])
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"


def test_only_an_assistant_calls() -> None:
    with pytest.raises(RequestError) as refused:
        rendered(WITH_TOOLS, [{**ASKED[1], "role": "user", "content": "x"}])
    assert refused.value.param == "messages[0].tool_calls"

"""Models that think first: what they thought, what they answer, and what that counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.frontend.tiny_tokenizer import CHAT_TEMPLATE, tiny_bundle
from tests.worker.server.replica import official_client
from tests.worker.server.speaker import running_speaker

MARKS = ("<think>", "</think>")
TEMPLATE = CHAT_TEMPLATE + "{# <think></think> #}"
OPEN = CHAT_TEMPLATE.replace("assistant\n'", "assistant\n<think>\n'") + "{# </think> #}"
CLOSED = OPEN.replace("<think>\n'", "<think>\n\n</think>\n\n'")
VERDICT = {
    "type": "object",
    "properties": {"ok": {"enum": [True]}},
    "required": ["ok"],
    "additionalProperties": False,
}


def saying(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say:{text}"}]
    return {"model": "tiny", "messages": messages, **fields}


async def test_thinking_is_told_apart_from_the_answer_and_counted() -> None:
    async with (
        running_speaker(tiny_bundle(template=TEMPLATE, marks=MARKS)) as replica,
        official_client(replica) as client,
    ):
        body = saying("<think>\nabc\n</think>\n\nwell")
        answer = await client.chat.completions.create(**body)
    (choice,) = answer.choices
    assert choice.message.content == "well"
    assert choice.message.model_extra == {"reasoning_content": "abc"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("\nabc\n")


async def test_a_stream_of_thinking_adds_up() -> None:
    async with (
        running_speaker(tiny_bundle(template=TEMPLATE, marks=MARKS)) as replica,
        official_client(replica) as client,
    ):
        stream = await client.chat.completions.create(
            **saying("<think>\nabc\n</think>\n\nwell"),
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thought = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(thought) == "abc"
    assert "".join(delta.content or "" for delta in deltas) == "well"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content", "count"),
    [
        (OPEN, "abc</think>well", "abc", "well", 3),
        (OPEN, "abc", "abc", None, 3),
        (CLOSED, "well</think>", None, "well</think>", 0),
        (TEMPLATE, "well", None, "well", 0),
    ],
)
async def test_the_prompts_end_says_whether_an_output_thinks(
    template: str, text: str, reasoning: str | None, content: str | None, count: int
) -> None:
    async with running_speaker(tiny_bundle(template=template, marks=MARKS)) as replica:
        # Exactly so many tokens: an end token would be one more of whatever it ends.
        limit = 1 + len(text) if "</think>" not in text else len(text) - len("</think>") + 2
        _, answer = await replica.post(
            "/v1/chat/completions", saying(text, max_tokens=limit - ("<" not in text))
        )
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


async def test_a_grammar_rules_the_answer_and_leaves_the_thinking_free() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": VERDICT}}
    for template, wish in (
        (TEMPLATE, "<think>hm, [{</think>not JSON"),
        (OPEN, "hm, [{</think>not JSON"),
        (CLOSED, "not JSON"),
    ):
        async with running_speaker(tiny_bundle(template=template, marks=MARKS)) as replica:
            _, answer = await replica.post(
                "/v1/chat/completions", saying(wish, response_format=form)
            )
        (choice,) = answer["choices"]
        assert json.loads(choice["message"]["content"])["ok"] is True
        assert choice["message"].get("reasoning_content") == (
            None if template is CLOSED else "hm, [{"
        )


async def test_thinking_that_would_never_answer_is_kept_from_ending() -> None:
    form = {"type": "json_object"}
    async with running_speaker(tiny_bundle(template=OPEN, marks=MARKS)) as replica:
        _, answer = await replica.post(
            "/v1/chat/completions", saying("hm", response_format=form, max_tokens=9)
        )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"].startswith("hm")


async def test_marks_that_are_no_tokens_leave_the_answer_to_the_grammar_alone() -> None:
    async with running_speaker(tiny_bundle(template=OPEN)) as replica:
        _, answer = await replica.post(
            "/v1/chat/completions",
            saying("hm</think>", structured_outputs={"choice": ["yes"]}),
        )
        _, free = await replica.post("/v1/chat/completions", saying("hm</think>yes"))
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert free["choices"][0]["message"]["content"] == "yes"
    assert free["choices"][0]["message"]["reasoning_content"] == "hm"
    assert free["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_a_demanded_call_may_be_thought_about_first() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": VERDICT}}]
    async with running_speaker(tiny_bundle(template=TEMPLATE, marks=MARKS)) as replica:
        _, answer = await replica.post(
            "/v1/chat/completions",
            saying("<think>call f?</think>no", tools=tools, tool_choice="required"),
        )
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "call f?"
    assert message["tool_calls"][0]["function"]["name"] == "f"


async def test_what_was_thought_reaches_the_template_again() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }};{% endfor %}"
    async with running_speaker(tiny_bundle(template=template)) as replica:
        turn = {"role": "assistant", "content": "b", "reasoning_content": "a"}
        _, answer = await replica.post("/tokenize", {"model": "tiny", "messages": [turn]})
        _, text = await replica.post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
    assert text["prompt"] == "a|b;"

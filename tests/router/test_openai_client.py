"""The official client against a replica, and against the gateway before it: the same answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.router.fake_replica import MODEL, TOKEN
from tests.router.running_gateway import ACME_KEY
from tests.router.test_gateway_real_replica import gateway_over_real_replica

TURNS: Any = [{"role": "user", "content": "the lorem"}]
IGNORE_EOS = {"ignore_eos": True}


@asynccontextmanager
async def both() -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """Clients of the gateway and of its only replica."""
    async with (
        gateway_over_real_replica() as (running, replica),
        openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key=ACME_KEY, max_retries=0
        ) as gateway,
        openai.AsyncOpenAI(base_url=f"{replica.url}/v1", api_key=TOKEN, max_retries=0) as direct,
    ):
        yield gateway, direct


CHATS: dict[str, dict[str, Any]] = {
    "a chat": {"temperature": 0},
    "four choices": {"n": 4},
    "log probabilities": {"logprobs": True, "top_logprobs": 3},
    "four choices with log probabilities": {"n": 4, "logprobs": True, "top_logprobs": 1},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {"7": -5}},
    "stop strings": {"stop": ["e", "o", "t", "a", "n"], "n": 2},
    "no stop strings in sight": {"stop": ["never seen"], "top_p": 0.9},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a completion": {"temperature": 0},
    "log probabilities": {"logprobs": 2, "n": 2},
    "an echo": {"echo": True, "logprobs": 1, "n": 2},
    "a stop string": {"stop": ["e", "o", "a"], "logprobs": 0},
}


def without_names(answer: Any) -> Any:
    """Leave out what differs from one request to the next."""
    return answer.model_copy(update={"id": "", "created": 0}).model_dump()


@pytest.mark.parametrize("what", CHATS)
async def test_a_chat_reads_the_same_from_both_whole_and_streamed(what: str) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": TURNS,
        "seed": 5,
        "max_tokens": 24,
        "extra_body": IGNORE_EOS,
        **CHATS[what],
    }
    async with both() as clients:
        whole = [await client.chat.completions.create(**asked) for client in clients]
        # The gateway salts, so each finds its prompt cached once it has asked before.
        assert without_names(whole[0]) == without_names(whole[1])
        for client in clients:
            texts = [""] * len(whole[0].choices)
            scores: list[list[Any]] = [[] for _ in texts]
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    if choice.logprobs is not None:
                        scores[choice.index] += choice.logprobs.content or []
            assert texts == [choice.message.content for choice in whole[0].choices]
            assert scores == [
                (choice.logprobs.content or []) if choice.logprobs else []
                for choice in whole[0].choices
            ]


@pytest.mark.parametrize("what", COMPLETIONS)
async def test_a_completion_reads_the_same_from_both_whole_and_streamed(what: str) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "the lorem",
        "seed": 5,
        "max_tokens": 24,
        "extra_body": IGNORE_EOS,
        **COMPLETIONS[what],
    }
    async with both() as clients:
        whole = [await client.completions.create(**asked) for client in clients]
        assert without_names(whole[0]) == without_names(whole[1])
        for client in clients:
            texts = [""] * len(whole[0].choices)
            async for chunk in await client.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [choice.text for choice in whole[0].choices]


async def test_both_refuse_the_same_field_in_the_same_words() -> None:
    refused: list[dict[str, Any]] = [
        {"presence_penalty": 3},
        {"top_logprobs": 30, "logprobs": True},
        {"logit_bias": {"x": 1}},
        {"n": 1000},
    ]
    async with both() as clients:
        for fields in refused:
            errors = []
            for client in clients:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(model=MODEL, messages=TURNS, **fields)
                errors.append((caught.value.param, caught.value.body))
            assert errors[0] == errors[1]
            assert errors[0][0] is not None


async def test_usage_of_every_chunk_passes_the_gateway() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with both() as clients:
        for client in clients:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=TURNS,
                max_tokens=5,
                stream=True,
                stream_options=options,
                extra_body=IGNORE_EOS,
            )
            usages = [chunk.usage async for chunk in stream]
            assert None not in usages
            assert usages[-1] is not None
            assert usages[-1].completion_tokens == 5

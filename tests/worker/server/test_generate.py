"""Chat completions and completions through the official client: whole, streamed, several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types import Completion

from engine.frontend.encoder import Encoder
from engine.frontend.sse import SseParser
from tests.engine.frontend.tiny_tokenizer import tiny_bundle
from tests.worker.server.replica import RunningReplica, official_client, running_replica

ENCODER = Encoder(tiny_bundle())
LONG = "the lorem on the ipsum in a dolor. " * 4
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": LONG}],
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica() as running:
        yield running


@pytest.fixture
async def client(replica: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with official_client(replica) as made:
        yield made


async def test_models_are_listed_with_their_length(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == "tiny"
    assert model.model_extra == {"max_model_len": 512}


@pytest.mark.fault("engine-4")
async def test_a_repeated_prompt_is_cached_but_for_its_last_token(
    replica: RunningReplica, client: openai.AsyncOpenAI
) -> None:
    prompt = list(range(32))
    answers = [
        await client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=5)
        for _ in range(2)
    ]
    assert [answer.choices[0].text for answer in answers] == [answers[0].choices[0].text] * 2
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached == [0, 16]
    assert replica.is_idle


async def test_a_chat_answer_has_openais_shape(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT, temperature=0, max_tokens=6)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**CHAT, temperature=0, max_tokens=60)
    stream = await client.chat.completions.create(
        **CHAT,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    first, last, usage = chunks[0], chunks[-2], chunks[-1]
    assert first.choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "length"]
    assert last.usage is None
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.usage.completion_tokens == 60
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_carries_usage_only_when_asked(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="a", max_tokens=3, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_choices_differ_by_their_draws_and_keep_their_index(
    client: openai.AsyncOpenAI,
) -> None:
    whole = await client.chat.completions.create(**CHAT, n=3, seed=5, max_tokens=40)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 120
    again = await client.chat.completions.create(**CHAT, n=3, seed=5, max_tokens=40, stream=True)
    streamed = ["", "", ""]
    async for chunk in again:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


async def test_several_prompts_are_answered_in_order(client: openai.AsyncOpenAI) -> None:
    both = await client.completions.create(
        model="tiny", prompt=["the", "lorem"], n=2, temperature=0, max_tokens=4
    )
    alone = [
        await client.completions.create(model="tiny", prompt=p, temperature=0, max_tokens=4)
        for p in ("the", "lorem")
    ]
    texts = [answer.choices[0].text for answer in alone]
    assert [choice.text for choice in both.choices] == [texts[0]] * 2 + [texts[1]] * 2
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)


async def test_token_ids_come_back_on_request(
    replica: RunningReplica, client: openai.AsyncOpenAI
) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "temperature": 0,
        "max_tokens": 20,
    }
    status, whole = await replica.post("/v1/completions", body | {"return_token_ids": True})
    (choice,) = whole["choices"]
    assert status == 200
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 20
    assert ENCODER.decode(choice["token_ids"]) == choice["text"]
    streamed: list[int] = []
    async for chunk in await client.completions.create(
        **body, stream=True, extra_body={"return_token_ids": True}
    ):
        streamed += chunk.choices[0].model_extra.get("token_ids", [])
    assert streamed == choice["token_ids"]


def num_ids(chunk: Completion) -> int:
    """Count the token ids that a chunk tells."""
    return len((chunk.choices[0].model_extra or {}).get("token_ids", []))


@pytest.mark.parametrize(("interval", "lengths"), [(1, [1] * 20), (8, [1, 8, 8, 3]), (50, [1, 19])])
async def test_a_client_may_have_its_tokens_several_at_a_time(
    client: openai.AsyncOpenAI, interval: int, lengths: list[int]
) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        temperature=0,
        max_tokens=20,
        stream=True,
        extra_body={"return_token_ids": True, "stream_interval": interval, "ignore_eos": True},
    )
    assert [n for n in [num_ids(chunk) async for chunk in stream] if n] == lengths


async def test_a_text_with_an_end_to_be_found_comes_token_by_token(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        max_tokens=20,
        stop=["not to be found"],
        stream=True,
        extra_body={"return_token_ids": True, "stream_interval": 8, "ignore_eos": True},
    )
    assert max([num_ids(chunk) async for chunk in stream]) == 1


async def test_a_stop_string_ends_the_choice_and_the_engines_work(replica: RunningReplica) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 300}
    _, whole = await replica.post("/v1/completions", body)
    text = whole["choices"][0]["text"]
    stop = next(c for c in text if c.isascii() and c.isprintable())
    _, stopped = await replica.post("/v1/completions", body | {"stop": [stop]})
    (choice,) = stopped["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert stopped["usage"]["completion_tokens"] < 300
    assert replica.is_idle


async def test_a_salt_keeps_prefixes_apart(replica: RunningReplica) -> None:
    async def cached(salt: str | None) -> int:
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 1, "cache_salt": salt}
        _, answer = await replica.post("/v1/completions", body)
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [await cached(salt) for salt in ("a", "a", "b", None, None)] == [0, 32, 0, 0, 32]


async def test_a_silent_engine_is_bridged_by_comments() -> None:
    async with running_replica(step_s=0.3, keep_alive_s=0.05) as replica:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}
        async with replica.session.post(replica.url + "/v1/completions", json=body) as response:
            events = SseParser().feed(await response.read())
        assert response.headers["Content-Type"].startswith("text/event-stream")
    assert events[0].comment is not None
    assert events[-1].is_done


async def test_a_response_says_what_the_chat_says(client: openai.AsyncOpenAI) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, **greedy
    )
    whole = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=6, **greedy
    )
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.id.startswith("resp_")) == ("incomplete", True)
    stream = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=6, stream=True, **greedy
    )
    events = [event async for event in stream]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    (last,) = [e.response for e in events if e.type == "response.incomplete"]
    assert last.usage is not None
    assert last.usage.output_tokens == 6
    assert events[-1].type == "response.incomplete"


async def test_a_response_refuses_in_the_names_of_its_own_fields(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="tiny", input="hello", max_output_tokens=10_000)
    assert refused.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="tiny", input="hello", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model="tiny", input="hello", stream=True, extra_body={"best_off": 1}
        )
    assert refused.value.param == "best_off"

"""Log probabilities, echo and scored prompts through the official client, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.frontend.encoder import Encoder
from engine.frontend.output_fold import OutputFold
from engine.frontend.sampling_params import SamplingParams
from tests.engine.frontend.tiny_tokenizer import tiny_bundle
from tests.worker.server.replica import RunningReplica, official_client, running_replica

ENCODER = Encoder(tiny_bundle())
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the lorem ipsum"}],
    "seed": 3,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
PROMPT = [(7 * i) % 256 for i in range(33)]
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica() as running:
        yield running


@pytest.fixture
async def client(replica: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with official_client(replica) as made:
        yield made


async def completion(replica: RunningReplica, **fields: Any) -> dict[str, Any]:
    """Post a completion; return its only choice, with the answer's usage."""
    status, answer = await replica.post("/v1/completions", BODY | fields)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return {**choice, "usage": answer["usage"]}


async def test_a_chats_tokens_come_with_exact_bytes_and_the_likeliest_others(
    client: openai.AsyncOpenAI,
) -> None:
    answer = await client.chat.completions.create(
        **CHAT, max_tokens=40, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert choice.model_extra is not None
    token_ids = choice.model_extra["token_ids"]
    assert [entry.bytes for entry in content] == [list(ENCODER.token_bytes(t)) for t in token_ids]
    for entry in content:
        assert entry.bytes is not None
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert [top.logprob for top in entry.top_logprobs] == [-1.0, -2.0]
        rank = -int(entry.logprob)
        assert rank > 2 or entry.top_logprobs[rank - 1].token == entry.token
    # Of what is no character, the text shows as much as the bytes do.
    shown = b"".join(bytes(entry.bytes or []) for entry in content)
    assert shown.decode("utf-8", "replace") == choice.message.content


async def test_without_a_number_the_tokens_come_alone(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT, max_tokens=3, logprobs=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.top_logprobs for entry in content] == [[], [], []]
    plain = await client.chat.completions.create(**CHAT, max_tokens=3)
    assert plain.choices[0].logprobs is None


async def test_streamed_choices_add_up_to_the_whole_ones(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**CHAT, "max_tokens": 30, "n": 3, "logprobs": True, "top_logprobs": 1}
    whole = await client.chat.completions.create(**asked)
    streamed: list[list[Any]] = [[], [], []]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.content or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        found = [entry.model_dump() for entry in streamed[choice.index]]
        assert found == [entry.model_dump() for entry in choice.logprobs.content or []]
        assert len(found) == 30


async def test_log_probabilities_end_where_a_stop_string_does(replica: RunningReplica) -> None:
    whole = await completion(replica, max_tokens=40, logprobs=1, return_token_ids=True)
    tokens: list[str] = whole["logprobs"]["tokens"]
    stop = next(token for token in tokens[5:] if token.isascii() and token.isprintable())
    cut = await completion(
        replica, max_tokens=40, logprobs=1, return_token_ids=True, stop=[stop], min_tokens=5
    )
    assert cut["stop_reason"] == stop
    num_tokens = len(cut["token_ids"])
    assert 5 < num_tokens < 40
    for name, values in cut["logprobs"].items():
        assert values == whole["logprobs"][name][:num_tokens]


@pytest.mark.fault("engine-5")
async def test_a_prompt_is_scored_in_full_both_times_although_it_is_cached(
    replica: RunningReplica,
) -> None:
    plain = [await completion(replica) for _ in range(2)]
    assert plain[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    first, second = [await completion(replica, prompt_logprobs=1) for _ in range(2)]
    assert first == second
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["text"] == plain[0]["text"]
    scores = first["prompt_logprobs"]
    assert (len(scores), scores[0]) == (33, None)
    for token_id, entry in zip(PROMPT[1:], scores[1:], strict=True):
        assert entry[str(token_id)] == {
            "logprob": -float(token_id % 4 + 1),
            "rank": token_id % 4 + 1,
            "decoded_token": ENCODER.token_bytes(token_id).decode("utf-8", "replace"),
        }
        assert len(entry) == (1 if token_id % 4 == 0 else 2)


@pytest.mark.fault("engine-5")
async def test_an_echoed_prompt_is_scored_in_full_both_times(replica: RunningReplica) -> None:
    answers = [await completion(replica, echo=True, logprobs=1) for _ in range(2)]
    assert answers[0] == answers[1]
    found = answers[0]["logprobs"]
    assert {name: len(values) for name, values in found.items()} == {
        "text_offset": 39,
        "token_logprobs": 39,
        "tokens": 39,
        "top_logprobs": 39,
    }
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["token_logprobs"][1] == -float(PROMPT[1] % 4 + 1)
    assert answers[0]["text"].startswith(ENCODER.decode(PROMPT))


async def test_offsets_point_to_where_tokens_begin_in_the_echoed_text(
    replica: RunningReplica,
) -> None:
    prompt = ENCODER.encode("the é lorem", add_special_tokens=False)
    found = await completion(replica, prompt=prompt, echo=True, logprobs=0, max_tokens=20)
    offsets, tokens = found["logprobs"]["text_offset"], found["logprobs"]["tokens"]
    assert tokens[:5] == ["the", " ", "\ufffd", "\ufffd", " "]
    assert offsets[:6] == [0, 3, 4, 4, 5, 6]
    assert offsets[len(prompt)] == len("the é lorem")
    assert offsets == sorted(offsets)


async def test_an_echo_alone_generates_nothing(replica: RunningReplica) -> None:
    found = await completion(replica, prompt="the lorem", echo=True, max_tokens=0, logprobs=1)
    assert (found["text"], found["finish_reason"]) == ("the lorem", "length")
    assert len(found["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 0
    assert replica.is_idle


async def test_an_echo_stream_begins_with_the_prompt(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the lorem",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = (await client.completions.create(**asked)).choices[0]
    chunks = [c.choices[0] async for c in await client.completions.create(**asked, stream=True)]
    assert chunks[0].text == "the lorem"
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    streamed = [o for chunk in chunks if chunk.logprobs for o in chunk.logprobs.text_offset or []]
    assert streamed == whole.logprobs.text_offset


async def test_every_choice_of_every_prompt_echoes_its_own(replica: RunningReplica) -> None:
    body = BODY | {"prompt": ["the", "lorem"], "n": 2, "echo": True, "logprobs": 0}
    _, answer = await replica.post("/v1/completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith("the") for text in texts] == [True, True, False, False]
    assert [text.startswith("lorem") for text in texts] == [False, False, True, True]
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"].count(None) == 1


async def test_every_chunk_states_the_usage_so_far_if_asked(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        **CHAT, max_tokens=5, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_a_prompt_is_cut_to_its_last_tokens_on_request(replica: RunningReplica) -> None:
    cut = await completion(replica, truncate_prompt_tokens=5, return_token_ids=True)
    assert cut["prompt_token_ids"] == PROMPT[-5:]
    longest = await completion(
        replica, prompt=PROMPT * 20, truncate_prompt_tokens=-1, return_token_ids=True
    )
    assert len(longest["prompt_token_ids"]) == 512 - 6
    status, answer = await replica.post("/v1/completions", BODY | {"truncate_prompt_tokens": 513})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_resumed_choice_goes_on_with_the_log_probabilities_of_what_is_new() -> None:
    async with running_replica(internal_token="t") as replica:
        auth = {"Authorization": "Bearer t"}
        asked = BODY | {"max_tokens": 30, "logprobs": 1, "presence_penalty": 0.5, "echo": True}
        asked |= {"return_token_ids": True, "prefixfleet": {"request_id": "a", "seed": 1}}
        _, whole = await replica.post("/v1/completions", asked, **auth)
        (expected,) = whole["choices"]
        known = 12
        fold = OutputFold(ENCODER, PROMPT, SamplingParams())
        text_length = len(fold.push(expected["token_ids"][:known]).text)
        resume = {
            "created": 5,
            "choices": [
                {
                    "index": 0,
                    "token_ids": expected["token_ids"][:known],
                    "text_length": text_length,
                }
            ],
        }
        fleet = {"request_id": "b", "seed": 1, "resume": resume}
        status, answer = await replica.post(
            "/v1/completions", asked | {"prefixfleet": fleet}, **auth
        )
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected["token_ids"]
        num_prompt = len(PROMPT)
        for name, values in choice["logprobs"].items():
            assert values[-18:] == expected["logprobs"][name][num_prompt + known :]
        assert answer["usage"]["completion_tokens"] == 30

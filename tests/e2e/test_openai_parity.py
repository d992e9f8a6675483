"""The official client on a fleet with a real model: gateway and replica give the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.fleet_process import FleetProcess, scripted_config
from tests.e2e.openai_clients import openai_clients
from tests.engine.frontend.tiny_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, tiny_bundle
from tests.worker.model_fixtures import WIDE, write_tiny_model

pytestmark = pytest.mark.slow

TURNS: Any = [{"role": "user", "content": "the lorem on the ipsum"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "four choices": {"n": 4, "logprobs": True, "top_logprobs": 1},
    "penalties": {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 3, "66": -100},
        "extra_body": {"ignore_eos": True, "repetition_penalty": 1.2, "min_p": 0.02},
    },
    "a stop string": {"stop": ["a", "e", "o", "t"], "temperature": 0.7},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """One replica that computes a small random model, behind a gateway."""
    # Compiled on every CPU: plain operations round by how much of a prompt is cached.
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, vocab_size=VOCAB_SIZE, **WIDE)
    for name, content in tiny_bundle().files.items():
        if name.startswith("tokenizer"):
            (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = scripted_config(folder, executor="model", replicas=1)
    del config["fleet"]["scripted"]
    config["worker"] |= {"dtype": "float32", "num_threads": 1}
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), config).start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def clients(fleet: FleetProcess) -> Iterator[list[openai.OpenAI]]:
    with openai_clients(fleet) as both:
        yield both


def asked(what: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": TURNS, "seed": 9, "max_tokens": 32}
    return {**fields, "extra_body": {"ignore_eos": True}, **REQUESTS[what], **more}


def comparable(answer: Any) -> Any:
    """Leave out what differs from one request to the next: names, instants, cache hits."""
    fields = json.loads(answer.model_dump_json(exclude={"id", "created", "usage"}))
    counts = answer.usage.completion_tokens, answer.usage.prompt_tokens
    return fields, counts


@pytest.mark.parametrize("what", REQUESTS)
def test_gateway_and_replica_answer_alike_whole_and_streamed(
    clients: list[openai.OpenAI], what: str
) -> None:
    whole = [client.chat.completions.create(**asked(what)) for client in clients]
    again = [client.chat.completions.create(**asked(what)) for client in clients]
    assert len({repr(comparable(answer)) for answer in [*whole, *again]}) == 1
    for client in clients:
        texts = [""] * len(whole[0].choices)
        for chunk in client.chat.completions.create(**asked(what, stream=True)):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole[0].choices]


def test_a_banned_token_never_comes_and_a_penalty_changes_the_answer(
    clients: list[openai.OpenAI],
) -> None:
    fields = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "max_tokens": 64}
    plain, penalised = (
        clients[0].chat.completions.create(**asked("greedy", **fields, **penalty))
        for penalty in ({}, {"frequency_penalty": 2, "logit_bias": {"66": -100}})
    )
    before, after = (
        (answer.choices[0].model_extra or {})["token_ids"] for answer in (plain, penalised)
    )
    assert 66 not in after
    assert len(set(after)) > len(set(before))


def test_a_prompt_is_scored_the_same_again_and_by_both(clients: list[openai.OpenAI]) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the lorem on the ipsum " * 4,
        "max_tokens": 0,
        "echo": True,
        "logprobs": 2,
    }
    answers = [client.completions.create(**fields) for client in clients * 2]
    assert len({repr(comparable(answer)) for answer in answers}) == 1
    scores = answers[0].choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert len(scores.token_logprobs) > 64


def test_a_response_is_the_same_at_both_whole_and_streamed(clients: list[openai.OpenAI]) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "input": TURNS[0]["content"],
        "temperature": 0,
        "max_output_tokens": 24,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "extra_body": {"seed": 9, "ignore_eos": True},
    }
    shown = []
    for client in clients:
        whole = client.responses.create(**fields)
        *_, last = client.responses.create(**fields, stream=True)
        for response in (whole, last.response):
            shown.append([part.model_dump_json() for part in response.output[0].content])
            assert (response.status, response.usage.output_tokens) == ("incomplete", 24)
    assert len({repr(parts) for parts in shown}) == 1
    chat = clients[0].chat.completions.create(**asked("greedy", max_tokens=24))
    assert whole.output_text == chat.choices[0].message.content

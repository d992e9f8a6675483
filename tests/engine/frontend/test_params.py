"""How a request becomes sampling parameters, and where it meets the model's limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.frontend.encoder import Encoder
from engine.frontend.errors import RequestError
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest
from engine.frontend.params import bad_word_ids, check_token_ids, sampling_params
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.sampling_params import SamplingParams
from tests.engine.frontend.tiny_tokenizer import tiny_bundle

ENCODER = Encoder(tiny_bundle())


def params_of(
    request: ChatCompletionRequest | CompletionRequest, num_prompt_tokens: int
) -> SamplingParams:
    return sampling_params(
        request,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=100,
        vocab_size=50,
        seed=7,
        encoder=ENCODER,
    )


def chat_params(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    request = parse_chat_request(json.dumps(body).encode())
    return params_of(request, num_prompt_tokens)


def completion_params(**fields: Any) -> SamplingParams:
    request = parse_completion_request(json.dumps({"model": "m", "prompt": "a"} | fields).encode())
    return params_of(request, 10)


def test_defaults_are_openais() -> None:
    assert chat_params() == SamplingParams(max_tokens=90, seed=7, seed_is_free=True)
    assert completion_params() == SamplingParams(max_tokens=16, seed=7, seed_is_free=True)


def test_every_field_arrives() -> None:
    params = chat_params(
        max_tokens=5,
        max_completion_tokens=6,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-1,
        stop="x",
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.5,
        logit_bias={"5": 10, "49": -100},
        allowed_token_ids=[1, 49],
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=0,
        skip_special_tokens=False,
    )
    assert params == SamplingParams(
        max_tokens=6,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=2**63 - 1,
        stop=("x",),
        stop_token_ids=(4,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-2.0,
        repetition_penalty=1.5,
        logit_bias=((5, 10.0), (49, -100.0)),
        allowed_token_ids=(1, 49),
        logprobs=4,
        prompt_logprobs=0,
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("fields", "num_output", "num_prompt"),
    [
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 3, 5),
        ({"echo": True}, None, None),
        ({"prompt_logprobs": 1}, None, 1),
    ],
)
def test_an_echo_scores_the_prompt_as_the_output(
    fields: dict[str, Any], num_output: int | None, num_prompt: int | None
) -> None:
    params = completion_params(**fields)
    assert (params.logprobs, params.prompt_logprobs) == (num_output, num_prompt)


def test_an_echo_alone_takes_one_step() -> None:
    assert completion_params(echo=True, max_tokens=0).max_tokens == 1


def test_a_bad_word_is_banned_at_the_start_and_behind_a_space() -> None:
    spelled = {
        text: tuple(ENCODER.encode(text, add_special_tokens=False))
        for text in ("the", " the", "中", " 中")
    }
    assert bad_word_ids(["the", " 中", "the"], ENCODER) == tuple(spelled.values())


@pytest.mark.fault("engine-31")
def test_a_biased_or_allowed_token_that_the_model_lacks_is_refused() -> None:
    for fields, param in (
        ({"logit_bias": {"3": 1, "50": 1}}, "logit_bias.50"),
        ({"allowed_token_ids": [3, 50]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ):
        with pytest.raises(RequestError) as caught:
            chat_params(**fields)
        assert (caught.value.kind, caught.value.param) == ("invalid_request", param)


def test_top_k_minus_one_is_off() -> None:
    assert chat_params(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields", "param"),
    [(100, {}, "messages"), (101, {}, "messages"), (90, {"max_tokens": 11}, "max_tokens")],
)
def test_what_does_not_fit_is_a_context_length_error(
    num_prompt_tokens: int, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chat_params(num_prompt_tokens, **fields)
    assert caught.value.kind == "context_length_exceeded"
    assert caught.value.param == param
    assert str(num_prompt_tokens) in caught.value.message


def test_a_prompt_that_leaves_one_token_fits() -> None:
    assert chat_params(99).max_tokens == 1


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize("token_id", [-1, 50, 2**40])
def test_a_stop_token_that_the_model_lacks_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError) as caught:
        chat_params(stop_token_ids=[3, token_id], min_tokens=1)
    assert caught.value.param == "stop_token_ids[1]"
    assert caught.value.message == f"stop_token_ids[1]: token id {token_id} is not in 0 to 49"


def test_min_tokens_above_what_fits_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens: must be at most max_tokens=90"):
        chat_params(min_tokens=91)


def test_token_ids_at_the_borders_are_fine() -> None:
    check_token_ids([0, 49], vocab_size=50, param="prompt")

"""Token ids of a text or a conversation, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.frontend.errors import RequestError
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenize import (
    TokenizeAnswer,
    detokenize,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize,
)
from kvindex.foundation.clock import VirtualClock
from tests.engine.frontend.tiny_tokenizer import BOS_ID, VOCAB_SIZE, tiny_bundle

PROMPTS = PromptEncoder(tiny_bundle(), clock=VirtualClock(), max_model_len=512)


def tokenized(**fields: Any) -> TokenizeAnswer:
    given = parse_tokenize_request(json.dumps(fields).encode())
    return tokenize(given, PROMPTS, max_model_len=512)


def test_a_text_gets_its_first_token_and_a_conversation_the_templates() -> None:
    text = tokenized(prompt="abc")
    assert (text.tokens[0], text.count, text.max_model_len) == (BOS_ID, 4, 512)
    assert tokenized(prompt="abc", add_special_tokens=False).tokens == text.tokens[1:]
    chat = tokenized(messages=[{"role": "user", "content": "abc"}])
    assert chat.tokens.count(BOS_ID) == 1
    silent = tokenized(messages=[{"role": "user", "content": "abc"}], add_generation_prompt=False)
    assert silent.count < chat.count


def test_token_texts_come_on_request() -> None:
    assert tokenized(prompt="ab").token_strs is None
    assert tokenized(prompt="ab", add_special_tokens=False, return_token_strs=True).token_strs == [
        "a",
        "b",
    ]


def test_ids_become_their_text_again() -> None:
    ids = tokenized(prompt="hello there", add_special_tokens=False).tokens
    given = parse_detokenize_request(json.dumps({"tokens": ids}).encode())
    assert detokenize(given, PROMPTS).prompt == "hello there"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"promt": "a"}, "body"),
    ],
)
def test_what_is_no_request_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        tokenized(**fields)
    assert refused.value.param == param


def test_a_token_that_the_model_lacks_has_no_text() -> None:
    given = parse_detokenize_request(json.dumps({"tokens": [1, VOCAB_SIZE + 1000]}).encode())
    with pytest.raises(RequestError) as refused:
        detokenize(given, PROMPTS)
    assert refused.value.param == "tokens[1]"

"""Log probabilities in the shapes of chat, completions and prompts."""

from __future__ import annotations

import math

import msgspec

from engine.frontend.encoder import Encoder
from engine.frontend.logprob_shapes import (
    ChatTokenLogprob,
    TopLogprob,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from engine.frontend.logprobs import TokenLogprobs
from tests.engine.frontend.tiny_tokenizer import tiny_bundle

ENCODER = Encoder(tiny_bundle())
A, B, C, E4, B8 = *b"abc", 0xE4, 0xB8


def test_half_a_character_shows_a_replacement_and_its_exact_byte() -> None:
    shown = chat_logprobs([TokenLogprobs(E4, -0.5, 1, [(E4, -0.5), (A, -1.5)])], ENCODER)
    assert shown.content == [
        ChatTokenLogprob(
            "\ufffd", -0.5, [0xE4], [TopLogprob("\ufffd", -0.5, [0xE4]), TopLogprob("a", -1.5, [A])]
        )
    ]


def test_the_impossible_is_written_as_a_number() -> None:
    entry = TokenLogprobs(A, -math.inf, 9, [(B, -math.inf)])
    encoded = msgspec.json.encode(chat_logprobs([entry], ENCODER))
    assert encoded.count(b"-9999.0") == 2
    shown = completion_logprobs([entry], [0], ENCODER)
    assert shown.token_logprobs == [-9999.0]
    assert shown.top_logprobs == [{"a": -9999.0, "b": -9999.0}]


def test_a_completion_lists_the_likeliest_and_the_chosen_once() -> None:
    entries = [
        TokenLogprobs(A, -0.1, 1, [(A, -0.1), (B, -3.0)]),
        TokenLogprobs(C, -5.0, 7, [(A, -0.1), (B, -3.0)]),
        TokenLogprobs(B, -3.0, 2),
    ]
    shown = completion_logprobs(entries, [0, 1, 2], ENCODER)
    assert shown.tokens == ["a", "c", "b"]
    assert shown.top_logprobs == [
        {"a": -0.1, "b": -3.0},
        {"a": -0.1, "b": -3.0, "c": -5.0},
        {"b": -3.0},
    ]


def test_of_tokens_that_look_alike_the_likelier_is_listed() -> None:
    entry = TokenLogprobs(A, -0.1, 1, [(A, -0.1), (E4, -2.0), (B8, -3.0)])
    assert completion_logprobs([entry], [0], ENCODER).top_logprobs == [{"a": -0.1, "\ufffd": -2.0}]


def test_an_echo_begins_with_a_token_that_follows_nothing() -> None:
    entry = TokenLogprobs(B, -1.0, 1, [(B, -1.0)])
    echo = echoed_logprobs([A, B], [entry], [0, 1], ENCODER)
    whole = joined(echo, completion_logprobs([TokenLogprobs(C, -2.0, 1)], [2], ENCODER))
    assert whole.tokens == ["a", "b", "c"]
    assert whole.token_logprobs == [None, -1.0, -2.0]
    assert whole.top_logprobs == [None, {"b": -1.0}, {"c": -2.0}]
    assert whole.text_offset == [0, 1, 2]


def test_a_prompts_entries_name_the_token_itself_first_with_its_own_rank() -> None:
    entry = TokenLogprobs(C, -5.0, 7, [(A, -0.1), (B, -3.0)])
    first, second = prompt_logprobs([entry], ENCODER)
    assert first is None
    assert second is not None
    assert [(t, e.logprob, e.rank, e.decoded_token) for t, e in second.items()] == [
        (C, -5.0, 7, "c"),
        (A, -0.1, 1, "a"),
        (B, -3.0, 2, "b"),
    ]

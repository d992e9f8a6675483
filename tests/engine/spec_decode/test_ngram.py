"""Guesses from the text itself: the longest n-gram at the end, where it came first."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.sampling_params import SamplingParams
from engine.spec_decode.ngram import NgramProposer, continuation
from engine.spec_decode.proposer import DraftContext


def after(tokens: list[int], *, low: int = 1, high: int = 3, count: int = 4) -> list[int]:
    text = memoryview(array("i", tokens))
    return continuation(text, min_ngram=low, max_ngram=high, count=count)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([5], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([9, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # two tokens match behind the 7, one behind the 9
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [8, 1, 2, 3]),  # the first of two equal n-grams
        ([7, 7, 7], [7]),  # the n-gram overlaps its repetition
        ([7, 7, 7, 7, 7, 7], [7, 7, 7]),
    ],
)
def test_what_followed_the_longest_ngram_the_first_time(
    tokens: list[int], expected: list[int]
) -> None:
    assert after(tokens) == expected


def test_an_ngram_shorter_than_the_least_is_no_reason_to_guess() -> None:
    assert after([1, 2, 3, 1], low=2) == []
    assert after([1, 2, 3, 1, 2], low=2) == [3, 1, 2]


def test_bytes_that_match_across_tokens_are_no_match() -> None:
    """Little-endian, the bytes of [1 << 8, 1 << 8] contain those of 1, one byte off."""
    assert after([1 << 8, 1 << 8, 5, 1], low=1) == []


def naive(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    for length in range(high, low - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + count]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0, 1, 256, 257, 65536]), max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
)
def test_the_search_is_the_obvious_one(tokens: list[int], low: int, more: int, count: int) -> None:
    assert after(tokens, low=low, high=low + more, count=count) == naive(
        tokens, low, low + more, count
    )


def test_a_request_without_a_match_gets_no_guess() -> None:
    proposer = NgramProposer(min_ngram=2, max_ngram=3)
    contexts = [
        DraftContext(request_id, memoryview(array("i", tokens)), 1, SamplingParams(), 0, count)
        for request_id, tokens, count in (("a", [1, 2, 3, 1, 2], 2), ("b", [1, 2, 3, 4], 2))
    ]
    assert proposer.propose(contexts) == {"a": [3, 1]}
    proposer.forget("a")
    assert proposer.propose(contexts) == {"a": [3, 1]}

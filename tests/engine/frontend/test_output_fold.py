"""The fold: deltas add up to the text, stop strings end it, tokens are cut where it ends."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.encoder import Encoder
from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.output_fold import Delta, OutputFold
from engine.frontend.sampling_params import SamplingParams
from engine.frontend.stop import StopMatch, find_stop, num_held_back
from tests.engine.frontend.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_bundle

ENCODER = Encoder(tiny_bundle())
A, B, C = b"abc"


def fold_of(**params: Any) -> OutputFold:
    return OutputFold(ENCODER, [], SamplingParams(**params))


def texts(fold: OutputFold, data: bytes) -> list[str]:
    """Push one byte per step, as long as the fold takes any; return the deltas' texts."""
    found = []
    for byte in data:
        found.append(fold.push([byte]).text)
        if fold.finished:
            break
    return found


def test_the_first_match_to_complete_wins_and_ties_go_to_the_first_in_the_list() -> None:
    def match(*stops: str) -> StopMatch | None:
        return find_stop("xabcd", stops, searched=0, scan_from=0)

    assert match("bcd", "ab") == StopMatch("ab", 1, 3)
    assert match("bc", "abc") == StopMatch("bc", 2, 4)
    assert match("abc", "bc") == StopMatch("abc", 1, 4)
    assert match("q") is None


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    assert num_held_back("xab", ["abc", "bq"], scan_from=0) == 2
    assert num_held_back("xab", ["abc"], scan_from=2) == 0
    assert num_held_back("xyz", ["abc"], scan_from=0) == 0
    assert num_held_back("aa", ["aaa"], scan_from=0) == 2


def test_text_flows_and_what_might_begin_a_stop_string_waits() -> None:
    fold = fold_of(stop=("abc",))
    assert texts(fold, b"xabxabc") == ["x", "", "", "abx", "", "", ""]
    assert (fold.text, fold.finish_reason, fold.stop_reason) == ("xabx", "stop", "abc")


def test_a_stop_string_may_be_included() -> None:
    fold = fold_of(stop=("abc",), include_stop_str_in_output=True)
    assert texts(fold, b"xabcd") == ["x", "a", "b", "c"]
    assert (fold.text, fold.stop_reason) == ("xabc", "abc")


def test_what_was_held_back_comes_out_when_the_engine_ends_the_choice() -> None:
    fold = fold_of(stop=("abc",))
    assert texts(fold, b"xa") == ["x", ""]
    delta = fold.push([B], finish_reason="length")
    assert delta == Delta(text="ab", token_ids=[B], finish_reason="length")
    assert fold.text == "xab"


def test_a_stop_string_outranks_the_engines_own_reason_in_the_same_step() -> None:
    fold = fold_of(stop=("b",))
    assert fold.push([A, B], finish_reason="length") == Delta(
        text="a", token_ids=[A, B], finish_reason="stop", stop_reason="b"
    )


@pytest.mark.fault("engine-7")
@pytest.mark.parametrize("include", [False, True])
def test_tokens_behind_the_completing_one_are_no_output(include: bool) -> None:
    fold = fold_of(stop=("b",), include_stop_str_in_output=include)
    delta = fold.push([A, B, C, C])
    assert delta.token_ids == [A, B]
    assert fold.token_ids == [A, B]
    assert fold.text == ("ab" if include else "a")
    assert fold.finished


@pytest.mark.fault("engine-7")
@pytest.mark.parametrize("include", [False, True])
def test_log_probabilities_are_cut_with_their_tokens(include: bool) -> None:
    fold = fold_of(stop=("b",), include_stop_str_in_output=include, logprobs=2)
    entries = [TokenLogprobs(token, -1.0, 1, [(token, -1.0), (C, -2.0)]) for token in (A, B, C, C)]
    delta = fold.push([A, B, C, C], logprobs=entries, finish_reason="length")
    assert delta.logprobs == fold.logprobs == entries[:2]
    assert delta.text_offsets == fold.text_offsets == [0, 1]


def test_a_token_begins_where_the_whole_characters_before_it_end() -> None:
    fold = fold_of(logprobs=0)
    offsets = []
    for byte in "a中é".encode():
        entry = TokenLogprobs(byte, -1.0, 1)
        offsets += fold.push([byte], logprobs=[entry]).text_offsets
    assert offsets == [0, 1, 1, 1, 2, 2]
    assert fold.text == "a中é"


def test_a_delta_without_tokens_has_no_log_probabilities() -> None:
    fold = fold_of(logprobs=1)
    fold.push([A], logprobs=[TokenLogprobs(A, -1.0, 1)])
    assert fold.push([], finish_reason="length").logprobs == []


def test_log_probabilities_begin_behind_what_was_made_elsewhere() -> None:
    fold = fold_of(logprobs=0)
    fold.restore([A, B], text_length=2)
    delta = fold.push([C], logprobs=[TokenLogprobs(C, -1.0, 1)])
    assert (delta.logprobs, delta.text_offsets) == ([TokenLogprobs(C, -1.0, 1)], [2])


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_special_tokens_show_only_if_they_are_not_skipped(skip: bool, text: str) -> None:
    fold = fold_of(skip_special_tokens=skip)
    assert "".join(fold.push([token]).text for token in (A, IM_END_ID, B)) == text


@pytest.mark.fault("engine-7")
def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    (the,) = ENCODER.encode("the", add_special_tokens=False)
    fold = fold_of(stop=("h",), include_stop_str_in_output=True)
    assert fold.push([the]) == Delta(
        text="th", token_ids=[the], finish_reason="stop", stop_reason="h"
    )


@pytest.mark.fault("engine-6")
def test_stop_strings_are_looked_for_only_behind_min_tokens() -> None:
    fold = fold_of(stop=("\n",), min_tokens=3)
    assert texts(fold, b"a\nb\ncd") == ["a", "\n", "b", ""]
    assert (fold.text, fold.stop_reason) == ("a\nb", "\n")


@pytest.mark.fault("engine-6")
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_a_stop_string_that_straddles_min_tokens_does_not_count(chunk: int) -> None:
    fold = fold_of(stop=("ab",), min_tokens=2)
    data = b"xabxab!"
    text = ""
    for start in range(0, len(data), chunk):
        text += fold.push(list(data[start : start + chunk])).text
        if fold.finished:
            break
    # "a" is the last token below the minimum, so only the second "ab" counts.
    assert text == fold.text == "xabx"


@pytest.mark.fault("engine-9")
def test_a_stop_string_of_many_bytes_is_found_and_cut_on_characters() -> None:
    fold = fold_of(stop=("中é",))
    data = "ä中xä中é!".encode()
    assert "".join(texts(fold, data)) == fold.text == "ä中xä"
    assert fold.stop_reason == "中é"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_no_text_unless_included(include: bool) -> None:
    fold = fold_of(stop_token_ids=(C,), include_stop_str_in_output=include)
    delta = fold.push([A, C], finish_reason="stop", stop_token_id=C)
    assert delta == Delta(
        text="ac" if include else "a", token_ids=[A, C], finish_reason="stop", stop_reason=C
    )


def test_the_models_own_end_token_is_no_stop_reason() -> None:
    fold = fold_of()
    delta = fold.push([A, IM_END_ID], finish_reason="stop", stop_token_id=IM_END_ID)
    assert delta == Delta(text="a", token_ids=[A, IM_END_ID], finish_reason="stop")


def test_a_fold_may_end_without_a_further_token() -> None:
    fold = fold_of()
    fold.push([A])
    assert fold.push([], finish_reason="length") == Delta(
        text="", token_ids=[], finish_reason="length"
    )


@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([A, B, C]), max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=40),
    stop=st.lists(st.text("abc ", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_deltas_add_up_and_do_not_depend_on_how_tokens_are_grouped(
    ids: list[int], cuts: list[int], stop: list[str], min_tokens: int, include: bool
) -> None:
    params = SamplingParams(
        stop=tuple(stop), min_tokens=min_tokens, include_stop_str_in_output=include
    )
    whole = OutputFold(ENCODER, [], params)
    at_once = whole.push(ids, finish_reason="length")
    grouped = OutputFold(ENCODER, [], params)
    deltas: list[Delta] = []
    start = 0
    for size in [*cuts, len(ids) + 1]:
        last = start + size >= len(ids)
        reason: Literal["length"] | None = "length" if last else None
        deltas.append(grouped.push(ids[start : start + size], finish_reason=reason))
        start += size
        if last or grouped.finished:
            break
    assert "".join(delta.text for delta in deltas) == grouped.text == whole.text == at_once.text
    assert [i for delta in deltas for i in delta.token_ids] == grouped.token_ids
    assert grouped.token_ids == whole.token_ids == at_once.token_ids
    assert (grouped.finish_reason, grouped.stop_reason) == (
        whole.finish_reason,
        whole.stop_reason,
    )


_STREAM_STOPS = ["ab", "中", "é", "the", "\n", "x中", "aab", "� "]
_STREAM_TEXTS = ["the a", "中文é", "aabab", "x", "\n", "é", "lo in ", "🙂", "\ufffd"]


def random_tokens(generator: random.Random) -> list[int]:
    """Texts in pieces of tokens, with bytes of characters that never become whole among them."""
    tokens: list[int] = []
    for _ in range(generator.randrange(1, 12)):
        text = ENCODER.encode(generator.choice(_STREAM_TEXTS), add_special_tokens=False)
        tokens += text[: generator.randrange(1, len(text) + 1)]
        tokens += [generator.randrange(128, 256)] * generator.randrange(2)
    return tokens


def test_a_thousand_streams_say_what_the_whole_answers_say() -> None:
    generator = random.Random(8)
    num_stopped = 0
    for _ in range(1000):
        tokens = random_tokens(generator)
        params = SamplingParams(
            stop=tuple(generator.sample(_STREAM_STOPS, generator.randrange(4))),
            min_tokens=generator.choice([0, 0, 3]),
            include_stop_str_in_output=generator.random() < 0.5,
        )
        prompt = random_tokens(generator)
        whole = OutputFold(ENCODER, prompt, params)
        whole.push(tokens, finish_reason="length")
        stream, streamed = OutputFold(ENCODER, prompt, params), ""
        left = tokens
        while not stream.finished:
            size = generator.randrange(1, 4)
            step, left = left[:size], left[size:]
            streamed += stream.push(step, finish_reason=None if left else "length").text
        assert streamed == stream.text == whole.text
        assert stream.token_ids == whole.token_ids
        assert stream.stop_reason == whole.stop_reason
        num_stopped += stream.stop_reason is not None
    assert 200 < num_stopped < 800

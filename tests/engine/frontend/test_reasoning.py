"""What was thought and what is answered, told apart at the marks of a family."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.reasoning import REASONING_FAMILIES, ReasoningSplit, ReasoningState

QWEN, R1 = REASONING_FAMILIES["qwen3"], REASONING_FAMILIES["deepseek_r1"]

CASES: list[tuple[ReasoningState, str, tuple[str, str]]] = [
    ("undecided", "<think>\nhm\n\nok\n</think>\n\nThe answer\n", ("hm\n\nok", "The answer\n")),
    ("undecided", "\n<think>\n\n</think>\n\nhi", ("", "hi")),
    ("undecided", "no <think> here", ("", "no <think> here")),
    ("undecided", "<thing>", ("", "<thing>")),
    ("undecided", "<thi", ("", "<thi")),
    ("thinking", "deep\n</thin king\n</think>\n\nans\n", ("deep\n</thin king", "ans\n")),
    ("thinking", "never ends\n", ("never ends\n", "")),
    ("thinking", "a</think>b</think>c", ("a", "b</think>c")),
    ("answering", "<think>x</think>", ("", "<think>x</think>")),
]


def split(state: ReasoningState, *parts: str) -> tuple[str, str]:
    fold = ReasoningSplit(QWEN, state)
    found = [*(fold.push(part) for part in parts), fold.finish()]
    return "".join(r for r, _ in found), "".join(a for _, a in found)


@pytest.mark.parametrize(("state", "text", "expected"), CASES)
def test_thinking_ends_at_its_mark(
    state: ReasoningState, text: str, expected: tuple[str, str]
) -> None:
    assert split(state, text) == expected
    assert split(state, *text) == expected


@given(case=st.sampled_from(CASES), cuts=st.sets(st.integers(1, 40), max_size=8))
def test_it_does_not_matter_how_the_text_is_cut(
    case: tuple[ReasoningState, str, tuple[str, str]], cuts: set[int]
) -> None:
    state, text, expected = case
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    starts = [0, *ends[:-1]]
    assert split(state, *(text[a:b] for a, b in zip(starts, ends, strict=True))) == expected


@pytest.mark.parametrize(
    ("tail", "qwen", "r1"),
    [
        ("assistant\n", "undecided", "thinking"),
        ("assistant\n<think>\n", "thinking", "thinking"),
        ("assistant\n<think>\n\n</think>\n\n", "answering", "answering"),
        ("", "undecided", "thinking"),
    ],
)
def test_how_an_output_begins_is_told_by_how_its_prompt_ends(
    tail: str, qwen: ReasoningState, r1: ReasoningState
) -> None:
    assert (QWEN.start(tail), R1.start(tail)) == (qwen, r1)

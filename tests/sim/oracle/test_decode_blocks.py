"""Answers fill blocks that the session's next prompt finds again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.oracle.bounds import infinite_cache
from sim.oracle.decode_blocks import infinite_cache_with_outputs
from sim.oracle.reuse import reuse_of
from sim.traces.row import TraceRow
from tests.sim.traces.samples import CONVERSATION_1000, MAGAGENT, MINISWE, sample


def turn(session: str | None, tokens: int, ids: tuple[int, ...], *, answer: int) -> TraceRow:
    return TraceRow(
        line=1,
        arrival_s=0.0,
        input_length=tokens,
        output_length=answer,
        hash_ids=ids,
        session_id=session,
    )


def hits(*rows: TraceRow) -> int:
    return infinite_cache_with_outputs(rows, block_size=4).hit_blocks


def test_the_next_prompt_finds_what_the_answer_filled() -> None:
    # 6 tokens and 7 of the answer fill 3 blocks; the prompt alone filled 1.
    first = turn("s", 6, (1,), answer=7)
    assert hits(first, turn("s", 20, (1, 2, 3, 4, 5), answer=1)) == 3


def test_a_partial_block_of_the_prompt_is_filled_by_the_answer() -> None:
    first = turn("s", 6, (1, 90), answer=2)
    assert hits(first, turn("s", 12, (1, 2, 3), answer=1)) == 2


def test_an_edited_history_finds_no_answer() -> None:
    first = turn("s", 8, (1, 2), answer=8)
    assert hits(first, turn("s", 16, (1, 5, 6, 7), answer=1)) == 1


def test_other_sessions_find_no_answer() -> None:
    first = turn("s", 4, (1,), answer=8)
    assert hits(first, turn("t", 12, (1, 2, 3), answer=1)) == 1
    assert hits(turn(None, 4, (1,), answer=8), turn(None, 12, (1, 2, 3), answer=1)) == 1


def test_recorded_output_blocks_are_found_by_all() -> None:
    first = TraceRow(
        line=1,
        arrival_s=0.0,
        input_length=4,
        output_length=8,
        hash_ids=(1,),
        output_hash_ids=(2, 3),
    )
    assert hits(first, turn(None, 16, (1, 2, 3, 4), answer=1)) == 3


@pytest.mark.parametrize(("path", "hit_blocks"), [(MINISWE, 142925), (MAGAGENT, 80311)])
def test_agents_read_their_answers_again(path: Path, hit_blocks: int) -> None:
    found = infinite_cache_with_outputs(sample(path).rows(), block_size=16)
    assert found.hit_blocks == hit_blocks


def test_without_sessions_it_is_the_bound_on_prompts() -> None:
    rows = list(sample(CONVERSATION_1000).rows())
    assert infinite_cache_with_outputs(rows, block_size=512) == infinite_cache(
        reuse_of(rows, block_size=512)
    )

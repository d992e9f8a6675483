"""The dispatcher: padded sizes, the order of choices, and what is captured when."""

from __future__ import annotations

import pytest

from worker.gpu.dispatcher import (
    CudaGraphMode,
    Dispatch,
    GraphDispatcher,
    GraphKey,
    GraphMode,
    capture_sizes,
)

FULL_4 = GraphKey(GraphMode.FULL, 4, 4, is_uniform=True)
PIECES_4 = GraphKey(GraphMode.PIECEWISE, 4, None, is_uniform=False)
PIECES_8 = GraphKey(GraphMode.PIECEWISE, 8, None, is_uniform=False)


def dispatcher(
    mode: CudaGraphMode = "full_and_piecewise", *, tokens_per_decode: int = 1, captured: bool = True
) -> GraphDispatcher:
    made = GraphDispatcher(mode, [4, 8], max_num_seqs=4, tokens_per_decode=tokens_per_decode)
    for key in made.all_keys() if captured else []:
        made.mark_captured(key)
    return made


def test_sizes_are_dense_where_steps_are_small() -> None:
    sizes = capture_sizes(max_num_seqs=256, max_num_batched_tokens=8192)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[34:38] == [256, 272, 288, 304]
    assert sizes[-1] == 512


def test_sizes_end_at_twice_the_largest_decode_and_at_the_budget() -> None:
    assert capture_sizes(max_num_seqs=8, max_num_batched_tokens=512) == [1, 2, 4, 8, 16]
    assert capture_sizes(max_num_seqs=8, max_num_batched_tokens=9) == [1, 2, 4, 8]


def test_with_drafts_there_are_sizes_of_whole_requests() -> None:
    sizes = capture_sizes(max_num_seqs=2, max_num_batched_tokens=512, tokens_per_decode=3)
    assert sizes == [1, 2, 3, 4, 6, 8, 9]


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("none", None, None),
        ("piecewise", PIECES_4, PIECES_4),
        ("full_decode_only", FULL_4, None),
        ("full_and_piecewise", FULL_4, PIECES_4),
        ("full", FULL_4, GraphKey(GraphMode.FULL, 4, 4, is_uniform=False)),
    ],
)
def test_each_mode_serves_decodes_and_mixed_steps_in_its_way(
    mode: CudaGraphMode, decode: GraphKey | None, mixed: GraphKey | None
) -> None:
    made = dispatcher(mode)
    assert made.dispatch(num_tokens=3, num_requests=3, is_uniform=True).key == decode
    assert made.dispatch(num_tokens=3, num_requests=2, is_uniform=False).key == mixed


def test_a_full_graph_pads_requests_and_a_piecewise_one_tokens_alone() -> None:
    made = dispatcher()
    assert made.dispatch(num_tokens=3, num_requests=3, is_uniform=True) == Dispatch(FULL_4, 4, 4)
    mixed = made.dispatch(num_tokens=5, num_requests=2, is_uniform=False)
    assert mixed == Dispatch(PIECES_8, 8, 2)


def test_a_step_beyond_every_size_is_eager_and_not_padded() -> None:
    eager = dispatcher().dispatch(num_tokens=9, num_requests=2, is_uniform=False)
    assert eager == Dispatch(None, 9, 2)
    assert eager.mode is GraphMode.NONE


def test_more_decodes_than_full_graphs_hold_run_in_pieces() -> None:
    made = GraphDispatcher("full_and_piecewise", [4, 8], max_num_seqs=6)
    for key in made.all_keys():
        made.mark_captured(key)
    step = made.dispatch(num_tokens=5, num_requests=5, is_uniform=True)
    assert step == Dispatch(PIECES_8, 8, 5)


def test_full_graphs_of_drafts_hold_whole_requests() -> None:
    made = GraphDispatcher("full_decode_only", [3, 4, 6], max_num_seqs=4, tokens_per_decode=3)
    assert made.all_keys() == [
        GraphKey(GraphMode.FULL, 6, 2, is_uniform=True),
        GraphKey(GraphMode.FULL, 3, 1, is_uniform=True),
    ]


def test_piecewise_is_captured_before_full_and_the_largest_first() -> None:
    assert dispatcher().all_keys() == [PIECES_8, PIECES_4, FULL_4]


def test_steps_are_eager_until_their_graph_is_captured_and_fall_back_meanwhile() -> None:
    made = dispatcher(captured=False)
    assert made.dispatch(num_tokens=3, num_requests=3, is_uniform=True).key is None
    made.mark_captured(PIECES_4)
    assert made.dispatch(num_tokens=3, num_requests=3, is_uniform=True).key == PIECES_4
    made.mark_captured(FULL_4)
    assert made.dispatch(num_tokens=3, num_requests=3, is_uniform=True).key == FULL_4


def test_what_was_missed_most_is_captured_first_and_the_rest_in_order() -> None:
    made = dispatcher(captured=False)
    assert made.next_to_capture(min_misses=1) is None
    assert made.next_to_capture(min_misses=0) == PIECES_8
    for _ in range(2):
        made.dispatch(num_tokens=3, num_requests=2, is_uniform=False)
    made.dispatch(num_tokens=8, num_requests=2, is_uniform=False)
    assert made.next_to_capture(min_misses=3) is None
    assert made.next_to_capture(min_misses=2) == PIECES_4
    made.mark_captured(PIECES_4)
    assert made.next_to_capture() == PIECES_8


def test_padding_is_counted_in_graphs_alone() -> None:
    made = dispatcher()
    made.dispatch(num_tokens=3, num_requests=3, is_uniform=True)
    made.dispatch(num_tokens=5, num_requests=1, is_uniform=False)
    made.dispatch(num_tokens=90, num_requests=1, is_uniform=False)
    assert made.num_padding_tokens == 4

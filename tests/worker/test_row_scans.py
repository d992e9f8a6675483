"""One look over rows of logits: which can be used, and which token is best."""

from __future__ import annotations

import torch

from worker.runner.row_scans import best_tokens, finite_rows

ROWS = torch.tensor(
    [[1.0, 3.0, 3.0], [-torch.inf, 0.0, 1.0], [torch.nan, 5.0, 0.0], [2.0, torch.inf, 1.0]]
)


def test_a_row_is_finite_if_all_of_it_is() -> None:
    assert finite_rows(ROWS).tolist() == [True, False, False, False]


def test_of_equal_logits_the_first_token_is_best() -> None:
    assert best_tokens(ROWS[:2]).tolist() == [1, 2]


def test_a_part_of_the_rows_may_be_looked_at() -> None:
    assert best_tokens(ROWS[[1, 0]]).tolist() == [2, 1]
    assert finite_rows(ROWS[::2]).tolist() == [True, False]
    assert finite_rows(torch.empty(0, 3)).tolist() == []


def test_finite_numbers_whose_sum_is_too_large_are_finite() -> None:
    rows = torch.full((2, 8), 3e38)
    rows[1, 3] = torch.inf
    assert finite_rows(rows).tolist() == [True, False]

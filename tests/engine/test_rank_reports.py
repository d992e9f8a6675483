"""What several ranks report is common when each of them reported it, as often as the least did."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.rank_reports import RankReports


@pytest.mark.fault("engine-19")
def test_twice_from_one_rank_and_never_from_another_is_not_common() -> None:
    reports: RankReports[str] = RankReports(2)
    assert not reports.add(0, "e")
    assert not reports.add(0, "e")
    assert reports.missing("e") == [1]


@pytest.mark.fault("engine-19")
def test_each_occurrence_is_common_once() -> None:
    reports: RankReports[str] = RankReports(2)
    assert [reports.add(rank, "e") for rank in (0, 0, 1, 1, 1)] == [False, False, True, True, False]
    assert reports.missing("e") == [0]


def test_ranks_that_begin_anew_have_reported_nothing() -> None:
    reports: RankReports[str] = RankReports(2)
    reports.add(0, "e")
    reports.clear()
    assert not reports.add(1, "e")
    assert reports.missing("e") == [0]


def test_one_rank_alone_agrees_with_itself() -> None:
    assert RankReports[str](1).add(0, "e")


@pytest.mark.fault("engine-19")
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"))))
def test_what_is_common_is_the_intersection_of_multisets(said: list[tuple[int, str]]) -> None:
    reports: RankReports[str] = RankReports(3)
    common = Counter(item for rank, item in said if reports.add(rank, item))
    each = [Counter(item for rank, item in said if rank == r) for r in range(3)]
    assert common == each[0] & each[1] & each[2]

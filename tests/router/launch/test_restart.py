"""Back-off doubles up to a limit, and the budget counts ends within a window."""

from __future__ import annotations

from router.launch.restart import RestartHistory, RestartPolicy

POLICY = RestartPolicy(initial_s=0.5, max_s=3.0, budget=4, window_s=60.0)


def test_delays_double_up_to_the_limit_and_then_the_budget_is_spent() -> None:
    history = RestartHistory(POLICY)
    assert [history.next_delay_s(now=t) for t in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, 3.0]
    assert history.next_delay_s(now=4.0) is None


def test_ends_that_are_older_than_the_window_are_forgotten() -> None:
    history = RestartHistory(POLICY)
    for t in (0.0, 1.0, 2.0, 3.0):
        history.next_delay_s(now=t)
    assert history.next_delay_s(now=60.5) == 3.0
    assert history.next_delay_s(now=200.0) == 0.5


def test_a_budget_of_zero_allows_no_restart() -> None:
    history = RestartHistory(RestartPolicy(initial_s=1, max_s=1, budget=0, window_s=60))
    assert history.next_delay_s(now=0.0) is None

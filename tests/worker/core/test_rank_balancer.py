"""Which rank gets the next request: fewest steps of queued prompts, then requests, then in turn."""

from __future__ import annotations

from worker.core.rank_balancer import RankBalancer

RANKS = (0, 1, 2)


def balancer() -> RankBalancer:
    return RankBalancer(3, max_step_tokens=100)


def test_idle_ranks_take_turns() -> None:
    ranks = balancer()
    assert [ranks.choose(RANKS) for _ in range(4)] == [0, 1, 2, 0]


def test_a_queued_prompt_weighs_as_many_steps_as_it_takes() -> None:
    ranks = balancer()
    ranks.begin(0, "a", num_prompt_tokens=101)
    for key in "bcd":
        ranks.begin(1, key, num_prompt_tokens=30)
    assert ranks.choose((0, 1)) == 1


def test_among_equally_short_queues_fewer_live_requests_win() -> None:
    ranks = balancer()
    for key in "ab":
        ranks.begin(0, key, num_prompt_tokens=500)
        ranks.prefilled(0, key)
    ranks.begin(1, "c", num_prompt_tokens=500)
    ranks.prefilled(1, "c")
    assert ranks.choose((0, 1)) == 1


def test_an_ended_request_weighs_nothing_whether_or_not_it_had_an_output() -> None:
    ranks = balancer()
    ranks.begin(0, "a", num_prompt_tokens=500)
    ranks.end(0, "a")
    ranks.begin(1, "b", num_prompt_tokens=500)
    ranks.prefilled(1, "b")
    ranks.prefilled(1, "b")
    ranks.end(1, "b")
    assert [ranks.choose((0, 1)) for _ in range(2)] == [0, 1]


def test_only_candidates_are_chosen() -> None:
    ranks = balancer()
    assert ranks.choose((2,)) == 2
    assert ranks.choose((1, 2)) == 1

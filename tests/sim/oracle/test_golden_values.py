"""The bounds of the fixture traces, pinned: two independent programs agreed on them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from sim.oracle.belady import Belady
from sim.oracle.bounds import by_session, cache_hits, capacity_bounds, infinite_cache
from sim.oracle.lru import lru_curve
from sim.oracle.reuse import Namespace, Reuse, reuse_of
from tests.sim.traces.samples import (
    CLAUDE_CODE,
    CONVERSATION,
    CONVERSATION_1000,
    MAGAGENT,
    MINISWE,
    SYNTHETIC_1000,
    sample,
)

HEAVY = pytest.mark.slow


@cache
def reuse(path: Path, namespace: Namespace | None) -> Reuse:
    trace = sample(path)
    assert trace.header.block_size is not None
    return reuse_of(trace.rows(), block_size=trace.header.block_size, namespace=namespace)


def rounded(rate: float | None, digits: int = 4) -> str:
    assert rate is not None
    return f"{rate:.{digits}f}".removeprefix("0")


@pytest.mark.parametrize(
    ("path", "hits", "references", "rates", "quarters"),
    [
        (CONVERSATION, 105710, 288500, ".3664 .3736 .3660 .3981", ".313 .382 .370 .409"),
        (CONVERSATION_1000, 5791, 27305, ".2121 .2157 .2117 .2717", ".063 .258 .220 .311"),
        (SYNTHETIC_1000, 4007, 23787, ".1685 .1726 .1679 .2740", ".053 .122 .243 .285"),
        (MINISWE, 141477, 151363, ".9347 .9360 .9347 .9413", ".926 .937 .938 .941"),
        (MAGAGENT, 77742, 92542, ".8401 .8404 .8343 .8817", ".876 .675 .897 .861"),
    ],
)
def test_an_infinite_cache_hits(
    path: Path, hits: int, references: int, rates: str, quarters: str
) -> None:
    bound = infinite_cache(reuse(path, None))
    assert (bound.hit_blocks, bound.references) == (hits, references)
    assert rates.split() == [
        rounded(bound.block_hit),
        rounded(bound.token_hit),
        rounded(bound.capped_block_hit),
        rounded(bound.token_hit_last_half),
    ]
    assert quarters.split() == [rounded(rate, 3) for rate in bound.block_hit_by_quarter]


@pytest.mark.parametrize(("path", "rate"), [(MINISWE, ".9338"), (MAGAGENT, ".8317")])
def test_perfect_stickiness_reaches(path: Path, rate: str) -> None:
    assert rounded(infinite_cache(reuse(path, by_session)).block_hit) == rate


CONVERSATION_LRU = [
    *(12092, 12168, 12916, 15857, 25350, 52381, 76632, 96618, 103701, 105402, 105710),
]


@pytest.mark.parametrize(
    ("path", "hits"),
    [
        (CONVERSATION, CONVERSATION_LRU),
        (CONVERSATION_1000, [999, 999, 1038, 1168, 2186, 4336, 5466, 5791]),
        (SYNTHETIC_1000, [118, 156, 241, 520, 1187, 2266, 3917, 4007]),
    ],
)
def test_lru_hits_exactly_at_doubling_capacities(path: Path, hits: list[int]) -> None:
    capacities = [256 << k for k in range(len(hits))]
    bounds = capacity_bounds(reuse(path, None), capacities)
    assert [bound.lru_hit_blocks for bound in bounds] == hits


def curves(path: Path, num_capacities: int, namespace: Namespace | None = None) -> list[str]:
    found = reuse(path, namespace)
    bounds = capacity_bounds(found, [256 << k for k in range(num_capacities)])
    return [
        f"{rounded(bound.lru_hit_blocks / found.num_references)}/"
        f"{rounded(bound.belady_hit_blocks / found.num_references)}"
        for bound in bounds
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            CONVERSATION,
            ".0419/.1006 .0422/.1384 .0448/.1928 .0550/.2573 .0879/.3243 .1816/.3664 "
            ".2656/.3664 .3349/.3664 .3594/.3664 .3653/.3664 .3664/.3664",
        ),
        (
            CONVERSATION_1000,
            ".0366/.0888 .0366/.1195 .0380/.1570 .0428/.2019 .0801/.2121 .1588/.2121 "
            ".2002/.2121 .2121/.2121",
        ),
        (
            SYNTHETIC_1000,
            ".0050/.0547 .0066/.0844 .0101/.1148 .0219/.1579 .0499/.1685 .0953/.1685 "
            ".1647/.1685 .1685/.1685",
        ),
        (
            MINISWE,
            ".5205/.5205 .6762/.6762 .8055/.8055 .9309/.9309 .9338/.9347 .9347/.9347",
        ),
        (MAGAGENT, ".5404/.5944 .6539/.7333 .7876/.8190 .8393/.8401 .8401/.8401"),
    ],
)
def test_lru_and_belady_at_doubling_capacities(path: Path, expected: str) -> None:
    assert curves(path, len(expected.split())) == expected.split()


@HEAVY
def test_claude_code_sessions_share_little_but_their_own_prefixes() -> None:
    shared = infinite_cache(reuse(CLAUDE_CODE, None))
    assert (shared.hit_blocks, shared.references) == (3749351, 3931143)
    assert (rounded(shared.block_hit), rounded(shared.token_hit)) == (".9538", ".9534")
    assert [rounded(rate, 3) for rate in shared.block_hit_by_quarter] == [
        *(".897", ".943", ".975", ".976"),
    ]
    sticky = infinite_cache(reuse(CLAUDE_CODE, by_session))
    assert rounded(sticky.block_hit) == ".9507"
    assert [rounded(rate, 3) for rate in sticky.block_hit_by_quarter] == [
        *(".887", ".937", ".975", ".976"),
    ]


@HEAVY
def test_claude_code_curves() -> None:
    assert curves(CLAUDE_CODE, 10) == [
        *(".0130/.0469", ".0142/.0718", ".0181/.1108", ".0309/.1797", ".0600/.2874"),
        *(".1284/.4487", ".3025/.6537", ".6768/.8395", ".8948/.9469", ".9538/.9538"),
    ]
    assert curves(CLAUDE_CODE, 10, by_session) == [
        *(".0009/.0186", ".0016/.0369", ".0036/.0723", ".0083/.1371", ".0248/.2422"),
        *(".0780/.4015", ".2294/.6110", ".6114/.8101", ".8689/.9350", ".9507/.9507"),
    ]


def test_the_warm_half_of_the_conversation_trace_agrees_with_a_public_simulator() -> None:
    """Token hits of the last 50 %, by kvcache-simulator 0.1.3: LRU, and its OPTIMAL."""
    found = reuse(CONVERSATION, None)
    lru, belady = lru_curve(found), Belady(found)
    warm = {
        capacity: [
            rounded(cache_hits(found, cache.row_hits(capacity)).token_hit_last_half, 3)
            for cache in (lru, belady)
        ]
        for capacity in (725, 1450, 2900, 5801, 11602, 23205, 46410)
    }
    assert warm == {
        725: [".046", ".169"],
        1450: [".049", ".233"],
        2900: [".065", ".306"],
        5801: [".135", ".375"],
        11602: [".235", ".398"],
        23205: [".319", ".398"],
        46410: [".375", ".398"],
    }

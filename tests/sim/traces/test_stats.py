"""What is reported of a trace, on recorded ones whose figures are known."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from sim.traces.arrivals import find_ticks
from sim.traces.measure import trace_stats
from sim.traces.percentiles import percentile, spread, weighted_percentile
from sim.traces.stats import TraceStats
from sim.traces.stats_text import stats_text
from tests.sim.traces.samples import (
    AZURE,
    CONVERSATION,
    CONVERSATION_1000,
    MAGAGENT,
    MINISWE,
    SYNTHETIC_1000,
    header,
    row,
    sample,
    write_lines,
)


@cache
def stats(path: Path) -> TraceStats:
    return trace_stats(sample(path))


@pytest.mark.parametrize(
    ("path", "requests", "inputs", "outputs", "references", "unique"),
    [
        (CONVERSATION, 12031, (6909, 27367, 85401, 12035), (350, 597, 343), 288500, 182790),
        (CONVERSATION_1000, 1000, (8431, 29265, 89867, 13733), (365, 600, 349), 27305, 21514),
        (SYNTHETIC_1000, 1000, (2926, 35572, 55673, 11852), (171, 442, 196), 23787, 19780),
        (MINISWE, 402, (3807, 12312, 34512, 6016), (98, 191, 113), 151363, 9886),
        (MAGAGENT, 746, (1190, 6451, 10689, 1977), (377, 563, 620), 92542, 14800),
    ],
)
def test_lengths_and_blocks(
    path: Path,
    requests: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    references: int,
    unique: int,
) -> None:
    found = stats(path)
    assert found.requests == requests
    assert found.input_length is not None
    assert found.output_length is not None
    lengths = found.input_length
    assert (lengths.p50, lengths.p90, lengths.p99, round(lengths.mean)) == inputs
    lengths = found.output_length
    assert (lengths.p50, lengths.p90, round(lengths.mean)) == outputs
    assert (found.references, found.unique_blocks) == (references, unique)


@pytest.mark.parametrize(
    ("path", "distances", "gaps_s"),
    [
        (CONVERSATION, (4281, 8294, 17829, 31434, 85218, 158280), (114, 519, 1578)),
        (CONVERSATION_1000, (2681, 5337, 8652, 12523, 19667, 19724), (66, 174, 291)),
        (SYNTHETIC_1000, (3294, 6958, 10828, 14283, 17550, 17590), (82, 190, 236)),
    ],
)
def test_reuse_distance(path: Path, distances: tuple[int, ...], gaps_s: tuple[int, ...]) -> None:
    found = stats(path).reuse_distance
    assert found is not None
    assert (found.p25, found.p50, found.p75, found.p90, found.p99, found.max) == distances
    gaps = (found.gap_s_p50, found.gap_s_p90, found.gap_s_p99)
    assert tuple(round(gap) for gap in gaps) == gaps_s


@pytest.mark.parametrize(
    ("path", "rates"),
    [
        (CONVERSATION, [0.114, 0.158, 0.232, 0.355, 0.528, 0.724, 0.879, 0.970]),
        (CONVERSATION_1000, [0.173, 0.210, 0.276, 0.383, 0.540, 0.722, 0.860, 0.951]),
        (SYNTHETIC_1000, [0.022, 0.042, 0.082, 0.159, 0.303, 0.558, 0.882, 1.000]),
    ],
)
def test_depth_of_hits(path: Path, rates: list[float]) -> None:
    inside = stats(path).hits_inside
    assert inside is not None
    assert [round(inside[1 << k], 3) for k in range(8)] == rates


@pytest.mark.parametrize(
    ("path", "hot", "continued", "branching", "continuing"),
    [
        (CONVERSATION, 0.114, 0.822, 0.064, 0.330),
        (CONVERSATION_1000, 0.173, 0.739, 0.088, 0.187),
        (SYNTHETIC_1000, 0.0, 0.520, 0.480, 0.051),
    ],
)
def test_where_hits_come_from(
    path: Path, hot: float, continued: float, branching: float, continuing: float
) -> None:
    found = stats(path)
    origins, num_hits = found.origins, found.infinite_hit_blocks
    assert origins is not None
    assert num_hits is not None
    assert origins.hot + origins.continued + origins.branching == num_hits
    parts = (origins.hot, origins.continued, origins.branching)
    assert [round(part / num_hits, 3) for part in parts] == [hot, continued, branching]
    assert round(origins.continuing_requests / found.requests, 3) == continuing


def test_skew() -> None:
    conversation, agents = stats(CONVERSATION).skew, stats(MAGAGENT).skew
    assert conversation is not None
    assert agents is not None
    shares = (conversation.top_1_percent, conversation.top_10_percent)
    assert [f"{share:.3f}" for share in shares] == ["0.122", "0.339"]
    assert f"{conversation.referenced_once:.3f}" == "0.758"
    assert (conversation.roots, conversation.hottest_root) == (1, 1.0)
    assert (conversation.branches, f"{conversation.hottest_branch:.3f}") == (7373, "0.004")
    assert (agents.roots, f"{agents.hottest_root:.3f}") == (4, "0.673")


@pytest.mark.parametrize(
    ("path", "sessions", "first_turn", "per_session"),
    [(MINISWE, 20, "0.041", 141338), (MAGAGENT, 25, "0.211", 76965)],
)
def test_sessions(path: Path, sessions: int, first_turn: str, per_session: int) -> None:
    found = stats(path)
    assert found.sessions == sessions
    assert f"{found.first_turn_block_hit:.3f}" == first_turn
    assert found.session_bound is not None
    assert found.session_bound.hit_blocks == per_session


def test_curves_name_their_capacity_in_blocks() -> None:
    found = trace_stats(sample(CONVERSATION_1000), capacities=[512, 4096])
    assert found.lru is not None
    assert {capacity: hits.hit_blocks for capacity, hits in found.lru.items()} == {
        512: 999,
        4096: 2186,
    }
    assert found.lru_curve == {512: 999 / 27305, 4096: 2186 / 27305}
    assert found.belady_curve is not None
    assert f"{found.belady_curve[512]:.4f}" == "0.1195"
    assert (found.infinite_hit_blocks, found.infinite_hit_tokens) == (5791, 2962776)


def test_a_coarse_clock_is_noticed() -> None:
    ticks = stats(CONVERSATION).arrivals.ticks
    assert ticks is not None
    assert (ticks.tick_s, ticks.num_times, ticks.largest_burst) == (3.0, 1180, 28)
    assert stats(CONVERSATION).notes[-1].startswith("times sit on ticks of about 3 s (1180 ")
    assert stats(SYNTHETIC_1000).arrivals.ticks is None


def test_bursts_are_no_ticks() -> None:
    """Many requests share times, but neighbouring times are as close as chance makes them."""
    instants = [sum(range(n)) / 100 for n in range(40)]
    assert find_ticks([at for at in instants for _ in range(5)]) is None
    assert find_ticks([0.0] * 200) is None


def test_without_hash_ids_hits_are_unknown_not_zero() -> None:
    found = stats(AZURE)
    assert (found.requests, found.block_size, found.infinite_hit_blocks) == (2000, None, None)
    assert (found.lru_curve, found.belady_curve, found.skew) == (None, None, None)
    assert stats_text(found).endswith("hits: unknown (the trace has no hash_ids)")


def test_a_block_size_alone_says_nothing_about_hits(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 9, "output_length": 1}
    found = trace_stats(sample(write_lines(tmp_path / "t", header(), line)))
    assert (found.block_size, found.infinite_hit_blocks) == (4, None)


def test_tenants_have_a_bound_of_their_own(tmp_path: Path) -> None:
    lines = (row(0, [1, 2], tenant="a"), row(1, [1, 2], tenant="b"), row(2, [1, 2], tenant="a"))
    found = trace_stats(sample(write_lines(tmp_path / "t", header(), *lines)))
    assert found.tenants == 2
    assert found.tenant_bound is not None
    assert (found.infinite_hit_blocks, found.tenant_bound.hit_blocks) == (4, 2)
    assert "per tenant           2     0.3333" in stats_text(found)


def test_an_empty_trace_has_no_rates(tmp_path: Path) -> None:
    found = trace_stats(sample(write_lines(tmp_path / "t", header())))
    assert (found.requests, found.references, found.lru_curve) == (0, None, None)
    assert found.arrivals.rate_per_s is None
    assert "0 requests in 0 s" in stats_text(found)


def test_percentiles_are_values_at_their_rank() -> None:
    assert [percentile([10, 20, 30, 40], q) for q in (0, 0.5, 0.99, 1)] == [10, 30, 40, 40]
    assert weighted_percentile([(1.0, 3), (2.0, 1)], 0.5) == 1.0
    assert weighted_percentile([(1.0, 3), (2.0, 1)], 0.75) == 2.0
    assert spread([]) is None

"""A validation as text for a terminal."""

from __future__ import annotations

from sim.live.compare import Comparison, Difference, Side
from sim.live.validation import Validation
from sim.traces.text_table import Cell, text_table


def validation_text(report: Validation) -> str:
    """Return everything about one validation."""
    found = report.comparison
    parts = [
        f"{report.trace}: {found.requests:,} requests, {report.mode}, policy {report.policy}, "
        f"{len(report.replicas)} replicas of {report.blocks:,} blocks of {report.block_size}; "
        f"latency {report.latency}",
        text_table(("", "live", "replay", "equal"), _rows(found)),
    ]
    if report.num_too_long:
        parts.append(f"Left out as too long for the fleet: {report.num_too_long:,}.")
    if found.equal_cached < found.requests:
        parts.append(
            f"Cached tokens differ by {found.mean_cached_difference:.2f} in the mean, "
            f"by {found.max_cached_difference:,} at most."
        )
    if found.num_mispredicted:
        parts.append(
            f"{found.num_mispredicted:,} live requests found another number of cached tokens than "
            "their gateway had predicted."
        )
    if found.num_index_lags:
        parts.append(f"The index lagged behind {found.num_index_lags:,} answers by seconds.")
    if found.first_difference is not None:
        parts.append(_difference(found.first_difference))
    parts.append(_verdict(found))
    return "\n\n".join(parts)


def _rows(found: Comparison) -> list[list[Cell]]:
    live, replay, ratio = found.ttft_live_s, found.ttft_replay_s, found.ttft_ratio
    return [
        ["answered", found.answered_live, found.answered_replay, found.equal_outcome],
        ["chosen replica", None, None, found.equal_replica],
        ["cached tokens", None, None, found.equal_cached],
        ["hit rate", found.hit_rate_live, found.hit_rate_replay, f"{found.hit_points:+.2f} points"],
        [
            "TTFT p50",
            live.p50 if live else None,
            replay.p50 if replay else None,
            f"x {ratio.p50:.3f}" if ratio else None,
        ],
        [
            "TTFT p95",
            live.p95 if live else None,
            replay.p95 if replay else None,
            f"x {ratio.p95:.3f}" if ratio else None,
        ],
    ]


def _difference(first: Difference) -> str:
    head = ("", "replica", "cached", "reusable", "active", "queued", "last placed", "score", "")
    return "\n".join(
        [
            f"First difference: line {first.line}, request {first.request_id}: {first.why}.",
            text_table(head, [*_side("live", first.live), *_side("replay", first.replay)]),
        ]
    )


def _side(name: str, side: Side) -> list[list[Cell]]:
    rows: list[list[Cell]] = [
        [
            name,
            ("* " if candidate.target.replica == side.replica else "  ") + str(candidate.target),
            candidate.num_cached_tokens,
            candidate.num_reusable_tokens,
            candidate.num_active,
            candidate.queued_prefill_tokens,
            candidate.last_placed,
            candidate.score,
            candidate.excluded or "",
        ]
        for candidate in sorted(side.candidates, key=lambda c: c.target)
    ]
    if rows:
        return rows
    return [[name, f"* {side.replica}", side.num_cached_tokens, *[None] * 5, side.error or ""]]


def _verdict(found: Comparison) -> str:
    if not found.exceeded:
        return "Within tolerance."
    return "Over tolerance:\n" + "\n".join(f"  {sentence}" for sentence in found.exceeded)

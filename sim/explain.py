"""Why one request of a replay went where it went, and what the alternatives were.

It replays the trace up to that request and keeps what its router saw at that moment; what came of
it is as if nothing had arrived after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvindex.foundation.errors import ConfigError
from router.policy.types import Candidate, TargetView
from sim.config import ReplayConfig
from sim.outcomes import Answer
from sim.placement import Attempt, Choice, Placed, Refused
from sim.replay import RowSource, run_replay
from sim.traces.row import TraceHeader, TraceRow
from sim.workload import block_size_of


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at the moment of the decision.

    `first_missing_block` counts from 0, None when all full blocks were there. What the planner
    weighed is None for a baseline.
    """

    replica: str
    chosen: bool
    matched_blocks: int
    first_missing_block: int | None
    uncached_tokens: int
    active: int | None = None
    queued_prefill_tokens: int | None = None
    expected_s: float | None = None
    score: float | None = None
    excluded: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision; `best_alternative` is the best of the others by score, else by match."""

    line: int
    request_id: str
    policy: str
    prompt_tokens: int
    blocks: int
    options: tuple[Option, ...]
    best_alternative: str | None
    refused: bool
    realised: Answer | None
    summary: str


class _Seen(msgspec.Struct):
    """The first decision about the line that is asked for."""

    line: int
    attempt: Attempt | None = None
    views: Sequence[TargetView] = ()
    chosen: Choice | None = None

    def take(self, attempt: Attempt, views: Sequence[TargetView], chosen: Choice) -> None:
        if self.attempt is None and attempt.arrival.line == self.line:
            self.attempt, self.views, self.chosen = attempt, list(views), chosen


def explain_line(
    header: TraceHeader, rows: RowSource, config: ReplayConfig, *, line: int
) -> Explanation:
    """Replay up to a line of the trace and explain its placement.

    Raises ConfigError when the replay has no request from that line.
    """
    seen = _Seen(line)
    outcomes = run_replay(header, lambda: _up_to(rows, line), config, observer=seen.take)
    if seen.attempt is None or seen.chosen is None:
        raise ConfigError(f"--line {line}: the replay has no request from that line")
    arrival = seen.attempt.arrival
    options = tuple(_options(seen, block_size_of(header, config)))
    realised = [a for a in outcomes.answers if a.line == line]
    return Explanation(
        line=line,
        request_id=arrival.request_id,
        policy=config.policy,
        prompt_tokens=arrival.num_prompt_tokens,
        blocks=len(arrival.hashes),
        options=options,
        best_alternative=_best_alternative(options),
        refused=isinstance(seen.chosen, Refused),
        realised=realised[0] if realised else None,
        summary=_summary(options, len(arrival.hashes)),
    )


def _up_to(rows: RowSource, line: int) -> Iterator[TraceRow]:
    for row in rows():
        if row.line > line:
            return
        yield row


def _options(seen: _Seen, block_size: int) -> Iterator[Option]:
    assert seen.attempt is not None
    arrival, chosen = seen.attempt.arrival, seen.chosen
    decision = chosen.decision if chosen is not None else None
    weighed: dict[object, Candidate] = (
        {candidate.target: candidate for candidate in decision.candidates} if decision else {}
    )
    winner = chosen.target if isinstance(chosen, Placed) else None
    for view in seen.views:
        candidate = weighed.get(view.target)
        matched, count = view.matched_blocks, len(arrival.hashes)
        uncached = arrival.num_prompt_tokens - matched * block_size
        yield Option(
            replica=view.target.replica,
            chosen=view.target == winner,
            matched_blocks=matched,
            first_missing_block=matched if matched < count else None,
            uncached_tokens=candidate.num_uncached_tokens if candidate else max(1, uncached),
            active=candidate.num_active if candidate else None,
            queued_prefill_tokens=candidate.queued_prefill_tokens if candidate else None,
            expected_s=candidate.expected_s if candidate else None,
            score=candidate.score if candidate else None,
            excluded=candidate.excluded if candidate else None,
        )


def _best_alternative(options: Sequence[Option]) -> str | None:
    others = [o for o in options if not o.chosen and o.excluded is None]
    if not others:
        return None
    scored = [(o.score, o) for o in others if o.score is not None]
    if scored:
        return min(scored, key=lambda pair: pair[0])[1].replica
    return max(others, key=lambda o: o.matched_blocks).replica


def _summary(options: Sequence[Option], num_blocks: int) -> str:
    """Say it in one sentence: what the chosen one held, and what the longest match would give."""
    chosen = next((o for o in options if o.chosen), None)
    if chosen is None:
        return "No replica took it."
    longest = max(options, key=lambda o: o.matched_blocks)
    held = f"{chosen.replica} held {chosen.matched_blocks} of {num_blocks} blocks"
    if longest.matched_blocks <= chosen.matched_blocks:
        return f"{held}, as many as any replica."
    more = longest.matched_blocks - chosen.matched_blocks
    reason = f" but was left out: {longest.excluded}" if longest.excluded else ""
    if longest.expected_s is not None and chosen.expected_s is not None and not reason:
        reason = (
            f", where the first token was expected after {longest.expected_s:.2f} s instead of "
            f"{chosen.expected_s:.2f} s"
        )
    return f"{held}; {longest.replica} held {more} more{reason}."

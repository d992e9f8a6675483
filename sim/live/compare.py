"""Live answers beside those of their replay, request by request: what agrees, and what does not.

Pure arithmetic over a `Twin`; it knows neither HTTP nor how either side came to its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from router.policy.types import Candidate, Decision
from sim.live.drive import Driven
from sim.live.twin import Twin
from sim.outcomes import Answer
from sim.traces.percentiles import percentile

_COMPARED = (
    "num_cached_tokens",
    "num_reusable_tokens",
    "num_active",
    "queued_prefill_tokens",
    "last_placed",
    "excluded",
)


class Tolerance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a replay may be off; None is not tested.

    `cached` and `replica` are shares of requests that must be equal, `hit` a difference of token
    hit rates in points, `ttft` a share by which p50 and p95 may differ.
    """

    cached: float | None = None
    replica: float | None = None
    hit: float | None = None
    ttft: float | None = None


ONE_BY_ONE = Tolerance(cached=1.0, replica=1.0, hit=0.0)
BY_THE_CLOCK = Tolerance(replica=0.99, hit=1.0)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One request on both sides; `answer` None when the replay refused it."""

    number: int
    driven: Driven
    answer: Answer | None
    replica: str | None
    decision: Decision | None

    @property
    def same_outcome(self) -> bool:
        """Whether both answered it, or neither did."""
        return (self.driven.received.error is None) == (self.answer is not None)

    @property
    def same_replica(self) -> bool:
        """Whether both chose the same replica."""
        return self.same_outcome and self.driven.replica == self.replica

    @property
    def ttfts(self) -> tuple[float, float] | None:
        """The seconds to the first token, live and replayed; None unless both answered."""
        live, answer = self.driven.received, self.answer
        replayed = answer.ttft_s if answer is not None else None
        if live.error is not None or live.ttft_s is None or replayed is None:
            return None
        return live.ttft_s, replayed

    @property
    def cached_difference(self) -> int:
        """Cached tokens of the replay beyond those of the live fleet; 0 where one has none."""
        live = self.driven.received.num_cached_tokens
        if live is None or self.answer is None:
            return 0
        return self.answer.num_hit_tokens - live

    @property
    def is_equal(self) -> bool:
        """Whether outcome, replica and cached tokens agree."""
        return self.same_replica and self.cached_difference == 0


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one side did with a request."""

    replica: str | None
    num_cached_tokens: int | None
    num_predicted_tokens: int | None
    ttft_s: float | None
    error: str | None
    candidates: tuple[Candidate, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first request that is not equal, and why as far as can be told."""

    line: int
    number: int
    request_id: str | None
    why: str
    live: Side
    replay: Side


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token."""

    p50: float
    p95: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides in figures; differences are replay minus live.

    Times are those of requests that both answered, None where there is none; `ttft_ratio` is
    replay over live. `num_mispredicted`: live
    requests that found another number of cached tokens than the gateway had predicted.
    """

    requests: int
    answered_live: int
    answered_replay: int
    equal_outcome: int
    equal_replica: int
    equal_cached: int
    mean_cached_difference: float
    max_cached_difference: int
    hit_rate_live: float
    hit_rate_replay: float
    hit_points: float
    ttft_live_s: Quantiles | None
    ttft_replay_s: Quantiles | None
    ttft_ratio: Quantiles | None
    num_mispredicted: int
    num_index_lags: int
    exceeded: tuple[str, ...]
    first_difference: Difference | None


def pairs(twin: Twin) -> list[Pair]:
    """Put both sides of each request together."""
    answers = {answer.number: answer for answer in twin.outcomes.answers}
    found = []
    for number, driven in enumerate(twin.driven):
        answer = answers.get(number)
        found.append(
            Pair(
                number=number,
                driven=driven,
                answer=answer,
                replica=twin.replicas[answer.replica] if answer is not None else None,
                decision=twin.decisions.get(number),
            )
        )
    return found


def compare(twin: Twin, tolerance: Tolerance, *, outside_s: float = 0.0) -> Comparison:
    """Compare both sides and test the tolerance.

    `outside_s` is what a client sees beyond the engine's own time to the first token.
    """
    both = pairs(twin)
    differences = [abs(pair.cached_difference) for pair in both]
    live_rate, replay_rate = _hit_rates(both)
    times = [pair.ttfts for pair in both if pair.ttfts is not None]
    live = _quantiles(ttft_s for ttft_s, _ in times)
    replay = _quantiles(ttft_s + outside_s for _, ttft_s in times)
    result = Comparison(
        requests=len(both),
        answered_live=sum(pair.driven.received.error is None for pair in both),
        answered_replay=sum(pair.answer is not None for pair in both),
        equal_outcome=sum(pair.same_outcome for pair in both),
        equal_replica=sum(pair.same_replica for pair in both),
        equal_cached=sum(pair.same_outcome and not pair.cached_difference for pair in both),
        mean_cached_difference=sum(differences) / len(both) if both else 0.0,
        max_cached_difference=max(differences, default=0),
        hit_rate_live=live_rate,
        hit_rate_replay=replay_rate,
        hit_points=100 * (replay_rate - live_rate),
        ttft_live_s=live,
        ttft_replay_s=replay,
        ttft_ratio=_ratio(live, replay),
        num_mispredicted=sum(_is_mispredicted(pair) for pair in both),
        num_index_lags=sum(pair.driven.index_lagged for pair in both),
        exceeded=(),
        first_difference=next((_difference(p) for p in both if not p.is_equal), None),
    )
    return msgspec.structs.replace(result, exceeded=tuple(_exceeded(result, tolerance)))


def _exceeded(result: Comparison, tolerance: Tolerance) -> Iterator[str]:
    """Say in sentences which tolerances do not hold."""
    total = max(1, result.requests)
    for name, equal, least in (
        ("cached tokens", result.equal_cached, tolerance.cached),
        ("the chosen replica", result.equal_replica, tolerance.replica),
    ):
        if least is not None and equal / total < least:
            yield (
                f"{name} equal for {equal:,} of {result.requests:,} requests, "
                f"{100 * least:g} % wanted"
            )
    if tolerance.hit is not None and abs(result.hit_points) > tolerance.hit + 1e-9:
        yield f"the hit rate differs by {result.hit_points:+.2f} points, {tolerance.hit:g} allowed"
    if tolerance.ttft is None:
        return
    ratio = result.ttft_ratio
    if ratio is None:
        yield "no first token was seen on both sides"
        return
    for name, value in (("p50", ratio.p50), ("p95", ratio.p95)):
        if abs(value - 1) > tolerance.ttft:
            yield (
                f"TTFT {name} of the replay is {value:.3f} times the live one, "
                f"{1 - tolerance.ttft:g} to {1 + tolerance.ttft:g} allowed"
            )


def _hit_rates(both: Sequence[Pair]) -> tuple[float, float]:
    """Return the token hit rates, live and replayed, over what both answered."""
    answered = [
        (pair.driven.received.num_cached_tokens or 0, pair.answer)
        for pair in both
        if pair.same_outcome and pair.answer is not None
    ]
    total = sum(answer.num_prompt_tokens for _, answer in answered)
    if not total:
        return 0.0, 0.0
    live = sum(cached for cached, _ in answered)
    return live / total, sum(answer.num_hit_tokens for _, answer in answered) / total


def _quantiles(values: Iterable[float]) -> Quantiles | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(p50=percentile(ordered, 0.5), p95=percentile(ordered, 0.95))


def _ratio(live: Quantiles | None, replay: Quantiles | None) -> Quantiles | None:
    if live is None or replay is None or not (live.p50 and live.p95):
        return None
    return Quantiles(p50=replay.p50 / live.p50, p95=replay.p95 / live.p95)


def _is_mispredicted(pair: Pair) -> bool:
    seen = pair.driven.received
    known = seen.num_predicted_tokens is not None and seen.num_cached_tokens is not None
    return known and seen.num_predicted_tokens != seen.num_cached_tokens


def _difference(pair: Pair) -> Difference:
    seen, answer = pair.driven.received, pair.answer
    replayed = pair.decision.candidates if pair.decision is not None else ()
    return Difference(
        line=pair.driven.row.line,
        number=pair.number,
        request_id=seen.request_id,
        why=_why(pair, replayed),
        live=Side(
            replica=pair.driven.replica,
            num_cached_tokens=seen.num_cached_tokens,
            num_predicted_tokens=seen.num_predicted_tokens,
            ttft_s=seen.ttft_s,
            error=seen.error,
            candidates=pair.driven.candidates,
        ),
        replay=Side(
            replica=pair.replica,
            num_cached_tokens=answer.num_hit_tokens if answer is not None else None,
            num_predicted_tokens=answer.num_predicted_tokens if answer is not None else None,
            ttft_s=answer.ttft_s if answer is not None else None,
            error=None if answer is not None else "refused",
            candidates=replayed,
        ),
    )


def _why(pair: Pair, replayed: Sequence[Candidate]) -> str:
    """Say what the two decisions saw differently, the cause of all that follows."""
    seen = pair.driven.received
    if not pair.same_outcome:
        what = seen.error or "answered"
        return f"live: {what}; replay: {'answered' if pair.answer else 'refused'}"
    by_target = {candidate.target: candidate for candidate in replayed}
    for live in sorted(pair.driven.candidates, key=lambda c: c.target):
        own = by_target.get(live.target)
        if own is None:
            return f"{live.target} was a candidate live and is none in the replay"
        for name in _COMPARED:
            left, right = getattr(live, name), getattr(own, name)
            if left != right:
                return f"{live.target}: {name} was {left} live, {right} in the replay"
    if not pair.same_replica:
        if not pair.driven.candidates:
            return "the choices differ; without an admin API it is not known what was weighed"
        return "both weighed the same and chose differently"
    return (
        f"same replica and same view, but {seen.num_cached_tokens} tokens were cached live "
        f"(predicted {seen.num_predicted_tokens}), "
        f"{pair.answer.num_hit_tokens if pair.answer else None} in the replay"
    )

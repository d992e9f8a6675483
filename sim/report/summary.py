"""The figures of one replay, from its outcomes; what `--json` prints.

Rates are over the requests that are counted: those after the warm-up. A figure that cannot be
known is null, never 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sim.bounds import Bounds
from sim.config import ReplayConfig
from sim.latency import LatencyModel
from sim.oracle.bounds import share
from sim.outcomes import Answer, Outcomes, TurnedAway
from sim.traces.percentiles import percentile

COLLAPSED = 0.9
"""From this share of all computed tokens on one replica, of several, placement has collapsed."""
NUM_WINDOWS = 24


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at ranks int(n * q)."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float


class ReplicaShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica did."""

    replica: str
    requests: int
    prompt_tokens: int
    uncached_tokens: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the replay, by arrival: balance and hits over time."""

    start_s: float
    requests: int
    imbalance: float | None
    token_hit: float | None


class TenantResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got."""

    requests: int
    answered: int
    limited: int
    shed: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    token_hit: float | None
    ttft_s: Quantiles | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one replay; tokens and blocks are of prompts.

    `imbalance` is max / mean of computed prompt tokens over the replicas. `of_infinite_bound`:
    share of what an infinite cache would hit. `limited` requests were over their tenant's limits,
    `shed` ones came when every replica was too far behind. `over_predicted_tokens`: promised by the
    router and not there; `under_predicted_tokens`: there and not promised.
    """

    policy: str
    params: dict[str, float]
    mode: str
    replicas: int
    blocks: int
    block_size: int
    gateways: int
    view: str
    isolation: str
    speed_up: float
    warm_up: str
    latency: str
    timing: str
    requests: int
    answered: int
    limited: int
    shed: int
    refused: int
    retries: int
    shed_rate: float
    references: int
    hit_blocks: int | None
    prompt_tokens: int
    hit_tokens: int | None
    block_hit: float | None
    token_hit: float | None
    of_infinite_bound: float | None
    of_pooled_belady: float | None
    over_predicted_tokens: int | None
    under_predicted_tokens: int | None
    imbalance: float | None
    fairness: float | None
    collapsed: bool
    per_replica: tuple[ReplicaShare, ...]
    duplicate_blocks: float | None
    evictions: int
    preemptions: int
    event_gaps: int
    duration_s: float | None
    ttft_s: Quantiles | None
    queue_s: Quantiles | None
    prefill_s: Quantiles | None
    total_s: Quantiles | None
    bounds: Bounds | None
    tenants: dict[str, TenantResult]
    windows: tuple[Window, ...]


def summarize(
    config: ReplayConfig,
    outcomes: Outcomes,
    *,
    block_size: int,
    latency: LatencyModel,
    bounds: Bounds | None,
) -> ReplayReport:
    """Return the report of one replay."""
    counted = counted_from(config, outcomes.num_arrivals)
    answers = sorted((a for a in outcomes.answers if counted(a.number)), key=lambda a: a.number)
    refused = [r for r in outcomes.refused if counted(r.number)]
    known = outcomes.has_prefix
    hit_blocks = sum(a.num_hit_blocks for a in answers)
    hit_tokens = sum(a.num_hit_tokens for a in answers)
    prompt_tokens = sum(a.num_prompt_tokens for a in answers)
    references = sum(a.num_blocks for a in answers)
    num_limited, num_shed, num_lost = _count_refused(refused)
    uncached = _uncached_by_replica(answers, config.replicas)
    num_requests = len(answers) + len(refused)
    return ReplayReport(
        policy=config.policy,
        params=config.params,
        mode=config.mode,
        replicas=config.replicas,
        blocks=config.blocks,
        block_size=block_size,
        gateways=config.gateways,
        view=_view(config),
        isolation=config.isolation,
        speed_up=config.speed_up,
        warm_up=_warm_up(config),
        latency=latency.name,
        timing=_timing(config, latency),
        requests=num_requests,
        answered=len(answers),
        limited=num_limited,
        shed=num_shed,
        refused=num_lost,
        retries=outcomes.num_retries,
        shed_rate=num_shed / num_requests if num_requests else 0.0,
        references=references,
        hit_blocks=hit_blocks if known else None,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens if known else None,
        block_hit=share(hit_blocks, references) if known else None,
        token_hit=share(hit_tokens, prompt_tokens) if known else None,
        of_infinite_bound=share(hit_blocks, bounds.infinite_hit_blocks) if bounds else None,
        of_pooled_belady=_of_belady(hit_blocks, bounds),
        over_predicted_tokens=sum(map(_over_predicted, answers)) if known else None,
        under_predicted_tokens=sum(map(_under_predicted, answers)) if known else None,
        imbalance=imbalance(uncached),
        fairness=_jain(uncached),
        collapsed=config.replicas > 1 and max(uncached) >= COLLAPSED * max(1, sum(uncached)),
        per_replica=_per_replica(answers, config.replicas),
        duplicate_blocks=share(outcomes.num_duplicate_blocks, outcomes.num_cached_blocks),
        evictions=outcomes.num_evictions,
        preemptions=outcomes.num_preemptions,
        event_gaps=outcomes.num_gaps,
        duration_s=outcomes.duration_s,
        ttft_s=quantiles(a.ttft_s for a in answers),
        queue_s=quantiles(a.queue_s for a in answers),
        prefill_s=quantiles(a.prefill_s for a in answers),
        total_s=quantiles(a.total_s for a in answers),
        bounds=bounds,
        tenants=_tenants(answers, refused, known=known),
        windows=_windows(answers, config.replicas, known=known),
    )


def counted_from(config: ReplayConfig, num_arrivals: int) -> Callable[[int], bool]:
    """Return the test whether a request counts, by its number: not part of the warm-up."""
    first = int(num_arrivals * config.warm_up)
    return lambda number: number >= first


def imbalance(tokens: Sequence[int]) -> float | None:
    """Return max / mean over the replicas; None when there is nothing to share."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else None


def quantiles(values: Iterable[float | None]) -> Quantiles | None:
    """Summarise seconds; None when there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Quantiles(
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        mean=sum(ordered) / len(ordered),
    )


def _of_belady(hit_blocks: int, bounds: Bounds | None) -> float | None:
    if bounds is None or bounds.pooled_belady_hit_blocks is None:
        return None
    return share(hit_blocks, bounds.pooled_belady_hit_blocks)


def _over_predicted(answer: Answer) -> int:
    return max(0, answer.num_predicted_tokens - answer.num_hit_tokens)


def _under_predicted(answer: Answer) -> int:
    return max(0, answer.num_hit_tokens - answer.num_predicted_tokens)


def _count_refused(refused: Sequence[TurnedAway]) -> tuple[int, int, int]:
    """Return how many a limit refused, how many were shed, and how many nobody could serve."""
    reasons = Counter(refusal.why for refusal in refused)
    return reasons["limited"], reasons["shed"], reasons["no_replica"] + reasons["too_long"]


def _uncached_by_replica(answers: Iterable[Answer], replicas: int) -> list[int]:
    tokens = [0] * replicas
    for answer in answers:
        tokens[answer.replica] += answer.num_uncached_tokens
    return tokens


def _jain(values: Sequence[int]) -> float | None:
    """Return Jain's index: 1 when all are equal, 1 / n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def _per_replica(answers: Iterable[Answer], replicas: int) -> tuple[ReplicaShare, ...]:
    by_replica: list[list[Answer]] = [[] for _ in range(replicas)]
    for answer in answers:
        by_replica[answer.replica].append(answer)
    return tuple(
        ReplicaShare(
            replica=f"replica-{i}",
            requests=len(own),
            prompt_tokens=sum(a.num_prompt_tokens for a in own),
            uncached_tokens=sum(a.num_uncached_tokens for a in own),
        )
        for i, own in enumerate(by_replica)
    )


def _tenants(
    answers: Iterable[Answer], refused: Iterable[TurnedAway], *, known: bool
) -> dict[str, TenantResult]:
    served: dict[str, list[Answer]] = defaultdict(list)
    turned_away: dict[str, list[TurnedAway]] = defaultdict(list)
    for answer in answers:
        served[answer.tenant].append(answer)
    for refusal in refused:
        turned_away[refusal.tenant].append(refusal)
    return {
        name: _tenant(served[name], turned_away[name], known=known)
        for name in sorted({*served, *turned_away})
    }


def _tenant(answers: list[Answer], refused: list[TurnedAway], *, known: bool) -> TenantResult:
    num_limited, num_shed, num_lost = _count_refused(refused)
    prompt_tokens = sum(a.num_prompt_tokens for a in answers)
    hit_tokens = sum(a.num_hit_tokens for a in answers)
    return TenantResult(
        requests=len(answers) + len(refused),
        answered=len(answers),
        limited=num_limited,
        shed=num_shed,
        refused=num_lost,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        token_hit=share(hit_tokens, prompt_tokens) if known else None,
        ttft_s=quantiles(a.ttft_s for a in answers),
    )


def _windows(answers: Sequence[Answer], replicas: int, *, known: bool) -> tuple[Window, ...]:
    """Divide the requests, by number, into parts of equal size."""
    size = -(-len(answers) // NUM_WINDOWS)
    windows = []
    for start in range(0, len(answers), size or 1):
        part = answers[start : start + size]
        prompt_tokens = sum(a.num_prompt_tokens for a in part)
        hit_tokens = sum(a.num_hit_tokens for a in part)
        windows.append(
            Window(
                start_s=part[0].at_s,
                requests=len(part),
                imbalance=imbalance(_uncached_by_replica(part, replicas)),
                token_hit=share(hit_tokens, prompt_tokens) if known else None,
            )
        )
    return tuple(windows)


def _view(config: ReplayConfig) -> str:
    view = config.view
    if view.kind == "history":
        return "own placements"
    parts = ["events of the replicas"]
    if view.delay_s:
        parts.append(f"{view.delay_s * 1000:g} ms late")
    if view.loss:
        parts.append(f"{view.loss:.1%} lost")
    if view.own and config.gateways > 1:
        parts.append("followed by each gateway")
    return ", ".join(parts)


def _warm_up(config: ReplayConfig) -> str:
    if not config.warm_up:
        return "none: caches start cold and every request counts"
    return f"the first {config.warm_up:.0%} of the requests fill the caches and are not counted"


def _timing(config: ReplayConfig, latency: LatencyModel) -> str:
    if config.mode == "order":
        return "none"
    return "calibrated" if latency.calibrated else "relative only"

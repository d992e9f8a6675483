"""What the figures of a replay say, in sentences; each states only what was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.report.summary import ReplayReport

_FAR_FROM_BOUND = 0.5
_LOPSIDED = 1.5
_SHED_MATTERS = 0.001


def sentences(report: ReplayReport) -> list[str]:
    """Return what stands out, most important first."""
    found = [*_collapse(report), *_hits(report), *_latency(report), *_refusals(report)]
    return [*found, *_predictions(report), *_tenants(report), *_trust(report)]


def compare(reports: Sequence[ReplayReport]) -> list[str]:
    """Return what several replays say about each other, fleet by fleet."""
    fleets: dict[tuple[int, int, str], list[ReplayReport]] = {}
    for report in reports:
        fleets.setdefault((report.replicas, report.blocks, report.isolation), []).append(report)
    found = []
    for (replicas, blocks, isolation), group in fleets.items():
        place = f"{replicas} replicas of {blocks:,} blocks, isolation {isolation}"
        hits = [r for r in group if r.token_hit is not None and not r.collapsed]
        if hits:
            best = max(hits, key=lambda r: r.token_hit or 0.0)
            found.append(f"{place}: most hits {named(best)}, {best.token_hit:.1%} of tokens.")
        timed = [(r.ttft_s.p95, r) for r in group if r.ttft_s is not None]
        if timed:
            p95, fastest = min(timed, key=lambda pair: pair[0])
            found.append(f"{place}: shortest TTFT p95 {named(fastest)}, {p95:.2f} s.")
        found += [f"{place}: {line}" for r in group if r.collapsed for line in _collapse(r)]
    return found


def named(report: ReplayReport) -> str:
    """Return the policy of a replay with its parameters."""
    params = " ".join(f"{key}={value:g}" for key, value in report.params.items())
    return f"{report.policy} ({params})" if params else report.policy


def _collapse(report: ReplayReport) -> list[str]:
    total = sum(share.uncached_tokens for share in report.per_replica)
    busiest = max(report.per_replica, key=lambda share: share.uncached_tokens)
    if report.collapsed:
        part = busiest.uncached_tokens / total
        return [
            f"COLLAPSED: {report.policy} put {part:.0%} of all computed prompt tokens on "
            f"{busiest.replica}; the other {report.replicas - 1} replicas were idle or nearly so "
            f"(max/mean {report.imbalance:.2f})."
        ]
    if report.imbalance is not None and report.imbalance >= _LOPSIDED:
        return [
            f"The load is lopsided: {busiest.replica} computed {report.imbalance:.2f} times the "
            "mean of prompt tokens."
        ]
    return []


def _hits(report: ReplayReport) -> list[str]:
    if report.token_hit is None:
        return ["The trace has lengths only: the hit rate is unknown."]
    found = [f"{report.token_hit:.1%} of all prompt tokens came from a cache."]
    bounds = report.bounds
    if bounds is None or report.of_infinite_bound is None:
        return found
    line = f"That is {report.of_infinite_bound:.0%} of what a cache without end would hit"
    if report.of_pooled_belady is not None:
        line += (
            f", and {report.of_pooled_belady:.0%} of what a clairvoyant would get from the same "
            f"{bounds.pooled_blocks:,} blocks in one pool"
        )
    found.append(f"{line}.")
    if report.of_infinite_bound < _FAR_FROM_BOUND and (report.of_pooled_belady or 0) > 0.8:
        found.append("The cache is too small for this traffic; a better policy would not help.")
    return found


def _latency(report: ReplayReport) -> list[str]:
    ttft, queue, prefill = report.ttft_s, report.queue_s, report.prefill_s
    if ttft is None or queue is None or prefill is None:
        return []
    part = "waiting" if queue.mean > prefill.mean else "the prefill"
    return [
        f"Half of the requests had their first token within {ttft.p50:.2f} s, 95 % within "
        f"{ttft.p95:.2f} s; on average most of it was {part} "
        f"({queue.mean:.2f} s queue, {prefill.mean:.2f} s prefill)."
    ]


def _refusals(report: ReplayReport) -> list[str]:
    found = []
    if report.shed_rate > _SHED_MATTERS:
        found.append(
            f"{report.shed:,} of {report.requests:,} requests ({report.shed_rate:.1%}) were shed: "
            "latencies are of the others."
        )
    if report.limited:
        found.append(
            f"{report.limited:,} requests ({report.limited / report.requests:.1%}) exceeded their "
            "tenant's limits and got a 429."
        )
    if report.refused:
        found.append(
            f"{report.refused:,} requests could not be served at all (too long, or no replica)."
        )
    if report.retries:
        found.append(f"{report.retries:,} attempts had to be repeated on another replica.")
    return found


def _predictions(report: ReplayReport) -> list[str]:
    if report.over_predicted_tokens is None or not report.prompt_tokens:
        return []
    share = report.over_predicted_tokens / report.prompt_tokens
    if share < _SHED_MATTERS:
        return []
    return [f"The router promised {share:.1%} of all prompt tokens that were not there any more."]


def _tenants(report: ReplayReport) -> list[str]:
    if len(report.tenants) < 2:
        return []
    limited = {name: tenant.limited for name, tenant in report.tenants.items()}
    shed = {name: tenant.shed for name, tenant in report.tenants.items()}
    return [*_who("was refused by limits", limited), *_who("was shed", shed)]


def _who(what: str, counts: Mapping[str, int]) -> list[str]:
    parts = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)
    return [f"Who {what}: {parts}."] if parts else []


def _trust(report: ReplayReport) -> list[str]:
    if report.timing == "relative only":
        return [
            f"Times are relative only: {report.latency} is an estimate, not a measurement of a "
            "replica; compare policies with it, not with a clock."
        ]
    return []

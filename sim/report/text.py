"""One replay, or several side by side, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from sim.explain import Explanation
from sim.report.sentences import named, sentences
from sim.report.summary import Quantiles, ReplayReport
from sim.traces.text_table import Cell, text_table

_HEAD = (
    "policy",
    "replicas",
    "blocks",
    "hit",
    "of bound",
    "TTFT p50",
    "p95",
    "p99",
    "max/mean",
    "shed",
    "",
)


def report_text(report: ReplayReport) -> str:
    """Return everything about one replay."""
    parts = [comparison([report]), "\n".join(sentences(report)), _replicas(report)]
    if report.ttft_s is not None:
        parts.append(_times(report))
    if len(report.tenants) > 1:
        parts.append(_tenants(report))
    parts.append(_settings(report))
    return "\n\n".join(parts)


def comparison(reports: Sequence[ReplayReport]) -> str:
    """Return one line per replay."""
    return text_table(_HEAD, [_line(report) for report in reports])


def explanation_text(found: Explanation) -> str:
    """Return one decision: the replicas, what each held and what was weighed."""
    rows: list[list[Cell]] = [
        [
            "*" if option.chosen else "",
            option.replica,
            option.matched_blocks,
            option.first_missing_block,
            option.uncached_tokens,
            option.active,
            option.queued_prefill_tokens,
            option.expected_s,
            option.score,
            option.excluded or "",
        ]
        for option in found.options
    ]
    head = (
        "",
        "replica",
        "matched",
        "first missing",
        "uncached",
        "active",
        "queued",
        "expected s",
        "score",
        "left out",
    )
    lines = [
        f"line {found.line}, {found.request_id}: {found.prompt_tokens:,} prompt tokens, "
        f"{found.blocks:,} full blocks; policy {found.policy}",
        text_table(head, rows),
        found.summary,
        f"Best alternative: {found.best_alternative or 'none'}.",
    ]
    if found.realised is not None:
        realised = found.realised
        lines.append(
            f"Realised: {realised.num_hit_tokens:,} cached tokens of "
            f"{realised.num_predicted_tokens:,} predicted"
            + (f", first token after {realised.ttft_s:.2f} s." if realised.ttft_s else ".")
        )
    return "\n".join(lines)


def _line(report: ReplayReport) -> list[Cell]:
    ttft = report.ttft_s
    return [
        named(report),
        report.replicas,
        report.blocks,
        report.block_hit,
        report.of_infinite_bound,
        ttft.p50 if ttft else None,
        ttft.p95 if ttft else None,
        ttft.p99 if ttft else None,
        report.imbalance,
        report.shed_rate,
        "COLLAPSED" if report.collapsed else "",
    ]


def _replicas(report: ReplayReport) -> str:
    rows: list[list[Cell]] = [
        [share.replica, share.requests, share.prompt_tokens, share.uncached_tokens]
        for share in report.per_replica
    ]
    return text_table(("replica", "requests", "prompt tokens", "computed"), rows)


def _times(report: ReplayReport) -> str:
    named = {
        "first token": report.ttft_s,
        "  queue": report.queue_s,
        "  prefill": report.prefill_s,
        "whole answer": report.total_s,
    }
    rows = [_quantiles(name, found) for name, found in named.items() if found is not None]
    return text_table(("seconds", "p50", "p90", "p95", "p99", "mean"), rows)


def _quantiles(name: str, found: Quantiles) -> list[Cell]:
    return [name, found.p50, found.p90, found.p95, found.p99, found.mean]


def _tenants(report: ReplayReport) -> str:
    rows: list[list[Cell]] = [
        [
            name,
            tenant.requests,
            tenant.limited,
            tenant.shed,
            tenant.refused,
            tenant.token_hit,
            tenant.ttft_s.p50 if tenant.ttft_s else None,
            tenant.ttft_s.p95 if tenant.ttft_s else None,
        ]
        for name, tenant in report.tenants.items()
    ]
    return text_table(
        ("tenant", "requests", "limited", "shed", "refused", "token hit", "TTFT p50", "p95"), rows
    )


def _settings(report: ReplayReport) -> str:
    return (
        f"mode {report.mode}, speed-up {report.speed_up:g}; blocks of {report.block_size} tokens; "
        f"router sees {report.view} ({report.gateways} gateway{'s' * (report.gateways > 1)}); "
        f"isolation {report.isolation}; latency {report.latency} ({report.timing}); "
        f"warm-up: {report.warm_up}"
    )

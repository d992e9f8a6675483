"""The HTML page of one or several replays: sentences, tables and charts in one file.

It needs no network and no script, and the same reports give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvindex.foundation.errors import PrefixFleetError
from sim.report.charts import NUM_COLOURS, Bar, Line, bar_chart, line_chart, percent
from sim.report.sentences import compare, named, sentences
from sim.report.summary import ReplayReport
from sim.report.traffic import Traffic

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--paper:#fff;--line:#d8dee4;
--mark:#cf222e;--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#9a6700;--c5:#cf222e;
--c6:#0a7ea4;--c7:#6e7781}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--paper:#0d1117;--line:#30363d;
--mark:#ff7b72;--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#d29922;--c5:#ff7b72;
--c6:#39c5cf;--c7:#8b949e}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:900px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2.2rem}
p{max-width:44rem}p.note{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.scroll{overflow-x:auto}svg{width:100%;height:auto;font-size:11px}
svg text{fill:var(--soft)}.grid{stroke:var(--line)}.line{fill:none;stroke-width:2}
.collapsed{color:var(--mark);font-weight:600}
.line.d1{stroke-dasharray:7 4}.line.d2{stroke-dasharray:2 4}
.bars{display:grid;grid-template-columns:fit-content(18rem) minmax(6rem,1fr) auto;
gap:.35rem .8rem;align-items:center;font-size:13px}
.label{text-align:right;color:var(--soft);overflow-wrap:anywhere}.value{color:var(--soft)}
.track{position:relative;display:flex;height:18px}.bar{display:block}
.cut{border-right:4px dotted var(--mark)}
.mark{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--mark)}
@media(max-width:40rem){svg{font-size:19px}.bars{grid-template-columns:minmax(0,1fr) auto}
.label{grid-column:1/-1;text-align:left;margin-bottom:-.35rem}}
ul.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;font-size:12px}
.key{display:inline-block;box-sizing:border-box;width:.9em;height:.9em;margin-right:.4em;
border:2px solid;border-radius:2px}.key.d1{border-style:dashed}.key.d2{border-style:dotted}
.key.d1,.key.d2{background:none!important}
"""


def write_page(
    path: Path, trace: str, reports: Sequence[ReplayReport], traffic: Traffic | None = None
) -> None:
    """Write the page; raise PrefixFleetError when the file cannot be written."""
    try:
        path.write_text(page(trace, reports, traffic), encoding="utf-8")
    except OSError as error:
        raise PrefixFleetError(f"--html {path}: {error.strerror}") from None


def page(trace: str, reports: Sequence[ReplayReport], traffic: Traffic | None = None) -> str:
    """Return the whole document."""
    title = f"Replay of {Path(trace).name}"
    lines = sentences(reports[0]) if len(reports) == 1 else compare(reports)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=note>{escape(_settings(reports[0]))}</p>",
        "".join(f"<p{_class(line)}>{escape(line)}</p>" for line in lines),
        _section("Results", _results(reports)),
        _section("Hit rate by policy and capacity", _hit_chart(reports)),
    ]
    if any(report.ttft_s for report in reports):
        parts.append(_section("Time to first token", _ttft_chart(reports)))
    parts.append(_section("Balance over time", _balance_chart(reports)))
    if any(len(report.tenants) > 1 for report in reports):
        parts.append(_section("Tenants", _tenants(reports)))
    parts.append(_section("Price of isolation", _isolation_chart(reports)))
    if traffic is not None:
        parts.append(_section("Capacity", _capacity_chart(traffic)))
        parts.append(_section("Reuse distance", _distance_chart(traffic)))
        parts.append(_section("Hot prefixes", _hot_prefixes(traffic)))
    colours = "".join(
        f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i}{{fill:var(--c{i})}}"
        f".bar.c{i},.key.c{i}{{background:var(--c{i})}}.key.c{i}{{border-color:var(--c{i})}}"
        for i in range(NUM_COLOURS)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _class(line: str) -> str:
    return " class=collapsed" if "COLLAPSED" in line else ""


def _settings(report: ReplayReport) -> str:
    return (
        f"Mode {report.mode}, speed-up {report.speed_up:g}, blocks of {report.block_size} tokens, "
        f"{_gateways(report)} {report.view}; latency {report.latency} "
        f"({report.timing}); warm-up: {report.warm_up}."
    )


def _gateways(report: ReplayReport) -> str:
    one = report.gateways == 1
    return "one gateway that sees" if one else f"{report.gateways} gateways that see"


def _fleet(report: ReplayReport) -> str:
    return f"{named(report)}, {report.replicas} × {report.blocks:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><tr>{top}</tr>{body}</table></div>"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _results(reports: Sequence[ReplayReport]) -> str:
    head = ("policy", "replicas", "blocks", "isolation", "token hit", "of bound", "TTFT p50 s")
    rows = [
        [
            named(r) + (" COLLAPSED" if r.collapsed else ""),
            str(r.replicas),
            f"{r.blocks:,}",
            r.isolation,
            _percent(r.token_hit),
            _percent(r.of_infinite_bound),
            _seconds(r.ttft_s.p50 if r.ttft_s else None),
            _seconds(r.ttft_s.p95 if r.ttft_s else None),
            _seconds(r.ttft_s.p99 if r.ttft_s else None),
            "–" if r.imbalance is None else f"{r.imbalance:.2f}",
            _percent(r.shed_rate),
        ]
        for r in reports
    ]
    return _table((*head, "p95", "p99", "max/mean", "shed"), rows)


def _hit_chart(reports: Sequence[ReplayReport]) -> str:
    """Draw lines over capacity where there are several, bars with the bound as a mark else."""
    if len({report.blocks for report in reports}) > 1:
        curves: dict[str, list[tuple[float, float]]] = {}
        for report in reports:
            name = f"{named(report)}, {report.replicas} replicas"
            curves.setdefault(name, []).append((report.blocks, report.token_hit or 0.0))
        lines = [Line(name, sorted(points)) for name, points in curves.items()]
        return line_chart(
            lines, x_title="blocks per replica", y_title="token hit", log_x=True, y_format=percent
        )
    bars = [
        Bar(
            _fleet(report),
            [report.block_hit or 0.0],
            _percent(report.block_hit),
            _infinite(report),
        )
        for report in reports
    ]
    return bar_chart(bars) + "<p class=note>Share of blocks; the mark is the infinite cache.</p>"


def _infinite(report: ReplayReport) -> float | None:
    bounds = report.bounds
    return bounds.infinite_hit_blocks / bounds.references if bounds and bounds.references else None


def _ttft_chart(reports: Sequence[ReplayReport]) -> str:
    bars, means = [], []
    for report in reports:
        if report.ttft_s and report.queue_s and report.prefill_s:
            text = f"p50 {report.ttft_s.p50:.2f} s, p95 {report.ttft_s.p95:.2f} s"
            bars.append(Bar(_fleet(report), [report.queue_s.mean, report.prefill_s.mean], text))
            if not report.collapsed:
                means.append(report.ttft_s.mean)
    # One that has collapsed would leave nothing to see of the others.
    chart = bar_chart(bars, ("queue, mean", "prefill, mean"), longest=max(means, default=None))
    is_cut = means and len(means) < len(bars)
    note = "<p class=note>Bars with a dotted end go far beyond the scale.</p>"
    return chart + (note if is_cut else "")


def _balance_chart(reports: Sequence[ReplayReport]) -> str:
    lines = [
        Line(
            _fleet(report),
            [(w.start_s, w.imbalance) for w in report.windows if w.imbalance is not None],
        )
        for report in reports
    ]
    return line_chart(lines, x_title="seconds", y_title="max / mean of computed tokens")


def _tenants(reports: Sequence[ReplayReport]) -> str:
    rows = [
        [
            name,
            _fleet(report),
            f"{tenant.requests:,}",
            f"{tenant.limited:,}",
            f"{tenant.shed:,}",
            _percent(tenant.token_hit),
            _seconds(tenant.ttft_s.p50 if tenant.ttft_s else None),
            _seconds(tenant.ttft_s.p95 if tenant.ttft_s else None),
        ]
        for report in reports
        for name, tenant in report.tenants.items()
    ]
    head = ("tenant", "policy", "requests", "limited", "shed", "token hit", "TTFT p50 s", "p95")
    return _table(head, rows)


def _isolation_chart(reports: Sequence[ReplayReport]) -> str:
    """Draw what an infinite cache hits when sessions, tenants or all share it."""
    bounds = reports[0].bounds
    if bounds is None or not bounds.references:
        return "<p class=note>The bounds were not computed.</p>"
    named_hits = (
        ("all share", bounds.infinite_hit_blocks),
        ("each tenant alone", bounds.tenant_hit_blocks),
        ("each session alone", bounds.session_hit_blocks),
    )
    bars = [
        Bar(name, [hits / bounds.references], _percent(hits / bounds.references))
        for name, hits in named_hits
        if hits is not None
    ]
    return bar_chart(bars) + (
        "<p class=note>Blocks that an infinite cache would hit; what is not named is not in the "
        "trace.</p>"
    )


def _capacity_chart(traffic: Traffic) -> str:
    total = traffic.references or 1
    lru = [(b.capacity, b.lru_hit_blocks / total) for b in traffic.capacity_curve]
    belady = [(b.capacity, b.belady_hit_blocks / total) for b in traffic.capacity_curve]
    lines = [Line("one pool, LRU", lru), Line("one pool, clairvoyant (Belady)", belady)]
    return line_chart(
        lines, x_title="blocks in all", y_title="block hit", log_x=True, y_format=percent
    )


def _distance_chart(traffic: Traffic) -> str:
    total = sum(distance.hits for distance in traffic.reuse_distance) or 1
    bars = [
        Bar(f"≤ {distance.at_most:,}", [float(distance.hits)], _percent(distance.hits / total))
        for distance in traffic.reuse_distance
    ]
    return bar_chart(bars) + "<p class=note>Other blocks used in between, of all hits.</p>"


def _hot_prefixes(traffic: Traffic) -> str:
    rows = [
        [f"{i}", f"{hot.blocks}", f"{hot.requests:,}", _percent(hot.share)]
        for i, hot in enumerate(traffic.hot_prefixes, start=1)
    ]
    return _table(("prefix", "blocks in common", "requests", "share"), rows)

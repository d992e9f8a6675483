"""`prefixfleet replay run | search | size | explain`: flags in, reports out."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from sim.baselines.registry import policy_names
from sim.config import ReplayConfig
from sim.explain import explain_line
from sim.progress import progress_bar
from sim.replay import read_bounds, read_traffic, report_replay
from sim.replay_flags import (
    add_one_fleet,
    add_one_policy,
    checked,
    open_flagged,
    read_config,
    replay_parser,
    trace_file,
)
from sim.replay_values import parse_params, whole_numbers
from sim.report.page import write_page
from sim.report.sentences import compare
from sim.report.summary import ReplayReport
from sim.report.text import comparison, explanation_text, report_text
from sim.routing import build_router
from sim.search import (
    default_jobs,
    grid,
    parse_policies,
    run_all,
    smallest_fleet,
)
from sim.traces.command import positive


def run(invocation: Invocation) -> int:
    """Replay a trace on one fleet with one policy."""
    parser = replay_parser(invocation, "Replay a trace on one fleet with one policy.")
    add_one_fleet(parser)
    parser.add_argument(
        "--no-bounds", action="store_true", help="do not compute what no policy could do better"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write charts there (default: no page)"
    )
    flags = parser.read()
    config = _one_fleet(flags)
    trace = open_flagged(flags)
    bounds = None if flags.no_bounds else read_bounds(trace.header, trace.rows, config)
    report = report_replay(trace.header, trace.rows, config, bounds=bounds)
    if flags.html is not None:
        write_page(flags.html, str(flags.trace), [report], read_traffic(trace, config))
    if invocation.as_json:
        print(as_json(report))
    else:
        print(report_text(report))
    return 0


def search(invocation: Invocation) -> int:
    """Replay a trace with every combination of policies, parameters and fleets."""
    parser = replay_parser(invocation, "Replay a trace with many policies on many fleets.")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:PARAM=V|V,…]",
        help="a policy with values to try; may be repeated "
        f"(default: all of {', '.join(policy_names())})",
    )
    parser.add_argument("--replicas", default="4", metavar="N,N,…", help="replicas of the fleets")
    parser.add_argument(
        "--blocks", default="4096", metavar="N,N,…", help="blocks of each replica, to try"
    )
    parser.add_argument(
        "--isolations", metavar="KIND,KIND,…", help="kinds to try (default: that of --isolation)"
    )
    _add_jobs_and_page(parser)
    flags = parser.read()
    base = read_config(flags)
    trace = open_flagged(flags)
    isolations = (flags.isolations or flags.isolation).split(",")
    configs = grid(
        base,
        policies=parse_policies(flags.policy or policy_names()),
        replicas=whole_numbers(flags.replicas, "--replicas"),
        blocks=whole_numbers(flags.blocks, "--blocks"),
        isolations=[checked({"isolation": kind}).isolation for kind in isolations],
    )
    for config in configs:
        build_router(config, gateway="")  # An unknown policy is told before hours of work.
    with progress_bar("replays", len(configs)) as done:
        reports = run_all(trace_file(flags), configs, jobs=flags.jobs or default_jobs(), done=done)
    if flags.html is not None:
        write_page(flags.html, str(flags.trace), reports, read_traffic(trace, base))
    if invocation.as_json:
        print(as_json({"runs": reports}))
    else:
        print(comparison(reports))
        print("\n" + "\n".join(compare(reports)))
    return 0


def size(invocation: Invocation) -> int:
    """Find the smallest fleet that meets a latency target; 1 when none does."""
    parser = replay_parser(invocation, "Find the smallest fleet that meets a latency target.")
    add_one_policy(parser)
    parser.add_argument(
        "--blocks", type=int, default=4096, metavar="N", help="blocks of each replica"
    )
    parser.add_argument(
        "--ttft-p95",
        type=float,
        required=True,
        metavar="SECONDS",
        help="the target: time to first token of 95 requests in 100, at most",
    )
    parser.add_argument(
        "--max-shed",
        type=float,
        default=0.001,
        metavar="SHARE",
        help="part of the requests that may be refused, 0 to 1",
    )
    parser.add_argument(
        "--max-replicas", type=int, default=64, metavar="N", help="do not try more than so many"
    )
    flags = parser.read()
    settings = {"policy": flags.policy, "params": parse_params(flags.param), "blocks": flags.blocks}
    base = read_config(flags, **settings)
    trace = open_flagged(flags)
    bounds = read_bounds(trace.header, trace.rows, base)

    with progress_bar("replays", None) as done:

        def run_with(replicas: int) -> ReplayReport:
            config = read_config(flags, **settings, replicas=replicas)
            report = report_replay(trace.header, trace.rows, config, bounds=bounds)
            done()
            return report

        best, tried = smallest_fleet(
            run_with,
            ttft_p95_s=flags.ttft_p95,
            max_shed_rate=flags.max_shed,
            most=flags.max_replicas,
        )
    if invocation.as_json:
        print(as_json({"replicas": best.replicas if best else None, "runs": tried}))
    else:
        print(comparison(sorted(tried, key=lambda report: report.replicas)))
        print("\n" + _verdict(best, flags.ttft_p95, flags.max_replicas))
    return 0 if best is not None else 1


def explain(invocation: Invocation) -> int:
    """Explain where one request of a replay went."""
    parser = replay_parser(invocation, "Explain where one request of a replay went, and why.")
    add_one_fleet(parser)
    parser.add_argument(
        "--line", type=int, required=True, metavar="N", help="which one: its line, from 1"
    )
    flags = parser.read()
    config = _one_fleet(flags)
    trace = open_flagged(flags)
    found = explain_line(trace.header, trace.rows, config, line=flags.line)
    print(as_json(found) if invocation.as_json else explanation_text(found))
    return 0


def as_json(value: object) -> str:
    """Return a report as JSON, the same bytes for the same report."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _one_fleet(flags: argparse.Namespace) -> ReplayConfig:
    return read_config(
        flags,
        policy=flags.policy,
        params=parse_params(flags.param),
        replicas=flags.replicas,
        blocks=flags.blocks,
    )


def _add_jobs_and_page(parser: CommandParser) -> None:
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="replays at a time (default: one for each processor)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write charts there (default: no page)"
    )


def _verdict(best: ReplayReport | None, target_s: float, most: int) -> str:
    if best is None:
        return f"Not even {most} replicas bring TTFT p95 to {target_s:g} s."
    plural = "s" * (best.replicas > 1)
    return f"{best.replicas} replica{plural} bring TTFT p95 to {target_s:g} s or less."

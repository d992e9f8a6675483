"""What every benchmark prints: a table for people, one JSON object for scripts.

The object is {claim, machine, settings, rows: [{name, ours, peer, unit, ratio, limit, goal, met}]};
`peer`, `ratio`, `limit`, `goal` and `met` are null where there is none.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import msgspec


class Row(msgspec.Struct, kw_only=True):
    """One measured figure; with a `goal`, `met` says whether ours is at most (or least) that."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    limit: float | None = None
    goal: str | None = None
    met: bool | None = None


class Report(msgspec.Struct, kw_only=True):
    """Everything that one benchmark found."""

    claim: str
    machine: str
    settings: dict[str, int | float | str]
    rows: list[Row]


def machine() -> str:
    """Describe this machine in a few words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def median_us(action: Callable[[], object], *, repeat: int) -> float:
    """Return the median time of one call in microseconds."""
    samples = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e6


def at_most(name: str, ours: float, unit: str, bound: float | None) -> Row:
    """Build a row whose goal, if any, is an upper bound."""
    if bound is None:
        return Row(name=name, ours=ours, unit=unit)
    return Row(name=name, ours=ours, unit=unit, goal=f"<= {bound:g}", met=ours <= bound)


def at_least(name: str, ours: float, unit: str, bound: float) -> Row:
    """Build a row whose goal is a lower bound."""
    return Row(name=name, ours=ours, unit=unit, goal=f">= {bound:g}", met=ours >= bound)


def flags(description: str) -> argparse.ArgumentParser:
    """Return a parser of the two flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under a minute")
    return parser


def arguments(description: str) -> argparse.Namespace:
    """Parse the two flags, for a benchmark that has no others."""
    return flags(description).parse_args()


def show(report: Report, *, as_json: bool) -> None:
    """Print the report to standard output."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return
    print(f"{report.claim}\n{report.machine}; {report.settings}")
    for row in report.rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        peer = "" if row.peer is None else f"peer {row.peer:,.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.1f} x"
        ours = f"{row.ours:>12,.{1 if row.ours >= 10 else 3}f} {row.unit:<4}"
        line = f"  {row.name:<60} {ours} {row.goal or '':>10} {verdict:<7}{peer:>14} {ratio:>8}"
        print(line.rstrip())

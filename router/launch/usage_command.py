"""`prefixfleet usage show | export`: what tenants have used, as totals or request by request."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlencode

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from router.launch.inspect import admin_parser, ask
from router.launch.table import table
from router.tenancy.usage import UsageRecord

Write = Callable[[dict[str, Any]], object]


def show(invocation: Invocation) -> int:
    """Show the totals by day, tenant, key and model."""
    parser = _period_parser(
        invocation, "Show usage by day, tenant, key and model.", since="30 days ago"
    )
    parser.add_argument("--until", metavar="DAY", help="last day of UTC (default: today)")
    flags = parser.read()
    query = _query(since=flags.since, until=flags.until, tenant=flags.tenant)
    rows = ask(invocation, parser, flags, f"/admin/usage{query}").body["totals"]
    print(json.dumps(rows) if invocation.as_json else table(rows))
    return 0


def export(invocation: Invocation) -> int:
    """Write one line for each request."""
    parser = _period_parser(
        invocation, "Write one line for each request, oldest first.", since="the oldest record"
    )
    parser.add_argument(
        "--format", choices=("jsonl", "csv"), default="jsonl", help="JSON lines, or CSV with a head"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write (default: standard output)"
    )
    flags = parser.read()
    records = _records(invocation, parser, flags)
    if flags.output is None:
        _write(records, sys.stdout, flags.format)
        return 0
    try:
        with flags.output.open("w", newline="", encoding="utf-8") as file:
            number = _write(records, file, flags.format)
    except OSError as error:
        raise ConfigError(f"{flags.output}: {error.strerror}") from None
    print(f"{flags.output}: {number} requests", file=sys.stderr)
    return 0


def _period_parser(invocation: Invocation, description: str, *, since: str) -> CommandParser:
    parser = admin_parser(invocation, description)
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant (default: all)")
    parser.add_argument(
        "--since", metavar="DAY", help=f"first day of UTC, such as 2026-11-01 (default: {since})"
    )
    return parser


def _records(
    invocation: Invocation, parser: CommandParser, flags: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Ask for page after page."""
    after: str | None = None
    while True:
        query = _query(since=flags.since, tenant=flags.tenant, after=after)
        body = ask(invocation, parser, flags, f"/admin/usage/records{query}").body
        yield from body["records"]
        after = body["next"]
        if after is None:
            return


def _write(records: Iterator[dict[str, Any]], file: TextIO, format: str) -> int:
    """Write records and return how many there were."""
    write = _csv_writer(file) if format == "csv" else _line_writer(file)
    number = 0
    for record in records:
        write(record)
        number += 1
    return number


def _csv_writer(file: TextIO) -> Write:
    names = [field.name for field in msgspec.structs.fields(UsageRecord)]
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    return writer.writerow


def _line_writer(file: TextIO) -> Write:
    return lambda record: print(json.dumps(record), file=file)


def _query(**values: str | None) -> str:
    given = {name: value for name, value in values.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""

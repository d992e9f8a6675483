"""Reports say what the data shows, the same bytes for the same data."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.cli import main
from sim.replay import read_bounds, report_replay
from sim.report.page import page
from sim.report.sentences import compare, sentences
from sim.report.summary import ReplayReport
from sim.report.text import report_text
from sim.report.traffic import describe_traffic
from tests.sim.replaying import BLOCK_SIZE, FIXTURES, HEADER, arrivals, conversation, plain, row

TRACE = str(FIXTURES / "conversation_first1000.jsonl.gz")
WANTED = {"policy", "replicas", "blocks", "hit_blocks", "hit_tokens", "ttft_s", "imbalance"}


@functools.cache
def report(**fields: Any) -> ReplayReport:
    """Replay the first minute of the conversation trace."""
    trace = conversation()
    config = plain(replicas=4, window=(0.0, 60.0), **fields)
    bounds = read_bounds(trace.header, trace.rows, config)
    return report_replay(trace.header, trace.rows, config, bounds=bounds)


def test_a_collapse_is_said_first() -> None:
    first = sentences(report(policy="greedy_prefix"))[0]
    assert first.startswith("COLLAPSED: greedy_prefix put 100% of all computed prompt tokens on ")
    assert "replica-0; the other 3 replicas were idle" in first


def test_uncalibrated_times_are_called_relative() -> None:
    timed = report(mode="open")
    assert timed.timing == "relative only"
    assert sentences(timed)[-1].startswith("Times are relative only: h100-8b is an estimate")


def test_the_first_token_is_split_into_queue_and_prefill() -> None:
    timed = report(mode="open")
    assert timed.ttft_s is not None
    assert timed.queue_s is not None
    assert timed.prefill_s is not None
    assert timed.ttft_s.mean == pytest.approx(timed.queue_s.mean + timed.prefill_s.mean)
    assert timed.ttft_s.p50 <= timed.ttft_s.p95 <= timed.ttft_s.p99


def test_a_warm_up_is_not_counted_and_said() -> None:
    cold, warm = report(), report(warm_up=0.5)
    assert warm.requests == cold.requests - cold.requests // 2
    assert warm.warm_up == "the first 50% of the requests fill the caches and are not counted"
    assert warm.bounds is not None
    assert warm.bounds.pooled_belady_hit_blocks is None
    assert warm.hit_blocks is not None
    assert warm.hit_blocks <= warm.bounds.infinite_hit_blocks


def test_several_replays_are_compared_fleet_by_fleet() -> None:
    lines = compare([report(mode="open"), report(mode="open", policy="hash_of_prefix")])
    assert [line.partition(":")[2].split(",")[0] for line in lines] == [
        " most hits prefix_cost",
        " shortest TTFT p95 prefix_cost",
    ]


def test_the_text_has_a_line_per_replica() -> None:
    text = report_text(report())
    assert re.findall(r"^replica-\d", text, re.MULTILINE) == [f"replica-{i}" for i in range(4)]


def test_the_page_is_one_file_without_scripts_or_links() -> None:
    rows = [row(line, float(line), [1, 2, 10 + line % 7]) for line in range(1, 50)]
    traffic = describe_traffic(arrivals(rows), block_size=BLOCK_SIZE)
    document = page("trace.jsonl", [report(mode="open"), report(policy="greedy_prefix")], traffic)
    assert document == page(
        "trace.jsonl", [report(mode="open"), report(policy="greedy_prefix")], traffic
    )
    assert not re.search(r"<script|<link|https?://|@import|url\(", document)
    for title in (
        "Hit rate by policy and capacity",
        "Time to first token",
        "Balance over time",
        "Price of isolation",
        "Reuse distance",
        "Hot prefixes",
    ):
        assert f"<h2>{title}</h2>" in document


def test_hot_prefixes_are_as_long_as_their_requests_agree() -> None:
    rows = [row(line, float(line), [1, 2, 3, line + 10]) for line in range(1, 9)]
    rows += [row(line, float(line), [1, 2, line + 50]) for line in range(9, 11)]
    traffic = describe_traffic(arrivals(rows), block_size=BLOCK_SIZE)
    assert [(hot.blocks, hot.requests) for hot in traffic.hot_prefixes] == [(3, 8), (2, 10)]
    assert sum(distance.hits for distance in traffic.reuse_distance) == 3 * 7 + 2 * 2


def test_the_command_prints_what_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "run", TRACE, "--window", "0:50", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() >= WANTED | {"bounds", "tenants"}
    assert printed["ttft_s"] is None


@pytest.mark.parametrize("mode", ["order", "open"])
def test_two_processes_print_the_same_bytes(mode: str) -> None:
    words = ["replay", "run", TRACE, "--window", "0:20", "--mode", mode, "--jitter", "--json"]
    if mode == "order":
        words.remove("--jitter")
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "router.cli", *words],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(outputs) == 1


def test_the_report_is_plain_json() -> None:
    encoded = msgspec.json.encode(report(mode="open"))
    assert msgspec.json.decode(encoded, type=ReplayReport) == report(mode="open")


def test_tenants_are_told_apart() -> None:
    rows = [row(line, 0.1 * line, [line], tenant="a" if line % 3 else "b") for line in range(1, 31)]
    found = report_replay(HEADER, lambda: rows, plain(mode="open"), bounds=None)
    assert {name: tenant.requests for name, tenant in found.tenants.items()} == {"a": 20, "b": 10}

"""Searches: grids, the smallest fleet, one explained request, and what mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvindex.foundation.errors import ConfigError
from router.cli import main
from router.config import RouterConfig
from router.policy.planner import PlannerConfig
from sim.config import GATEWAY_GUARDS
from sim.explain import explain_line
from sim.latency import PROFILES, load_latency
from sim.replay import report_replay
from sim.report.summary import ReplayReport
from sim.search import PolicyGrid, grid, parse_policies, run_all, smallest_fleet
from sim.trace_file import TraceFile
from tests.sim.replaying import FIXTURES, HEADER, conversation, plain, row

TRACE = str(FIXTURES / "conversation_first1000.jsonl.gz")


def test_a_grid_has_every_combination() -> None:
    configs = grid(
        plain(),
        policies=parse_policies(["round_robin", "prefix_cost:work_weight=1|2"]),
        replicas=[2, 4],
        blocks=[64],
        isolations=["shared", "tenant"],
    )
    assert len(configs) == 2 * 2 * 3
    assert [(c.replicas, c.policy, c.params) for c in configs[:4]] == [
        (2, "round_robin", {}),
        (2, "prefix_cost", {"work_weight": 1.0}),
        (2, "prefix_cost", {"work_weight": 2.0}),
        (4, "round_robin", {}),
    ]


def test_a_search_in_processes_gives_what_one_by_one_gives() -> None:
    configs = grid(
        plain(window=(0.0, 30.0)),
        policies=[PolicyGrid(name="round_robin"), PolicyGrid(name="prefix_cost")],
        replicas=[2],
        blocks=[512],
        isolations=["recorded"],
    )
    count: list[None] = []
    apart = run_all(TraceFile(path=TRACE), configs, jobs=2, done=lambda: count.append(None))
    assert apart == run_all(TraceFile(path=TRACE), configs, jobs=1, done=lambda: None)
    assert len(count) == 2


def test_the_smallest_fleet_is_found_by_doubling_and_halving() -> None:
    trace = conversation()

    def run(replicas: int) -> ReplayReport:
        config = plain(mode="open", replicas=replicas, window=(0.0, 30.0), latency="a100-8b")
        return report_replay(trace.header, trace.rows, config, bounds=None)

    best, tried = smallest_fleet(run, ttft_p95_s=12.0, max_shed_rate=0.0, most=16)
    assert best is not None
    assert best.ttft_s is not None
    assert best.ttft_s.p95 <= 12.0
    smaller = next(r for r in tried if r.replicas == best.replicas - 1)
    assert smaller.ttft_s is not None
    assert smaller.ttft_s.p95 > 12.0
    none, _ = smallest_fleet(run, ttft_p95_s=0.001, max_shed_rate=0.0, most=2)
    assert none is None


def test_explain_names_the_first_missing_block_and_the_alternative() -> None:
    shared = list(range(28))
    rows = [row(1, 0.0, [*shared, 90]), row(2, 1.0, [91]), row(3, 2.0, [*shared, 92, 93])]
    config = msgspec.structs.replace(plain(), replicas=2, blocks=64)
    found = explain_line(HEADER, lambda: rows, config, line=3)
    by_match = {option.matched_blocks: option for option in found.options}
    assert by_match[28].chosen
    assert by_match[28].first_missing_block == 28
    assert found.best_alternative == by_match[0].replica
    assert found.summary.endswith("held 28 of 30 blocks, as many as any replica.")
    assert found.realised is not None
    assert found.realised.num_hit_tokens == 28 * 16


def test_profiles_are_estimates_and_files_may_be_measured(tmp_path: Path) -> None:
    assert all(not load_latency(name).calibrated for name in PROFILES)
    file = tmp_path / "mine.json"
    measured = msgspec.structs.replace(load_latency("l4-8b"), name="mine", calibrated=True)
    file.write_bytes(msgspec.json.encode(measured))
    assert load_latency(str(file)) == measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "prefix_coost"], "did you mean"),
        (["--param", "work_weight"], "--param 'work_weight': expected NAME=NUMBER"),
        (["--latency", "h100-9b"], "no such profile"),
        (["--latency", "none.json"], "latency none.json: No such file"),
        (["--window", "5:2"], "--window '5:2': expected FROM:TO"),
        (["--fail", "9:1:1", "--mode", "open"], "--fail: no replica 9; the last one is 3"),
        (["--fail", "0:-1:5", "--mode", "open"], "--fail: at_s: expected a number of at least 0.0"),
        (
            ["--tenant", "a:max_parallel=0"],
            "--tenant: max_parallel: expected a whole number of at least 1",
        ),
        (["--fail", "now"], "--fail 'now': expected REPLICA:AT:DOWN"),
        (["--replicas", "0"], "--replicas: expected a whole number of at least 1"),
        (["--tenant", "b:size=2"], "'size=2' is not one of scale"),
        (["--policy", "random", "--tenant", "b:policy=session"], "tenant b: a policy of its own"),
        (["--block-size", "100"], "block size 100: expected a divisor or a multiple"),
        (["--jitter"], "--jitter needs a clock"),
    ],
)
def test_mistakes_name_the_flag_and_the_remedy(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "run", TRACE, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_commands_print_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    short = [TRACE, "--window", "0:20", "--json"]
    page = tmp_path / "page.html"
    words = [
        "--policy",
        "round_robin",
        "--policy",
        "sticky_session",
        "--jobs",
        "1",
        "--html",
        str(page),
    ]
    assert main(["replay", "search", *short, *words]) == 0
    assert [run["policy"] for run in json.loads(capsys.readouterr().out)["runs"]] == [
        "round_robin",
        "sticky_session",
    ]
    assert page.read_text().startswith("<!doctype html>")
    target = ["--mode", "open", "--guards", "gateway", "--ttft-p95", "1000"]
    assert main(["replay", "size", *short, *target]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"] == 1
    assert main(["replay", "explain", *short, "--line", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["line"] == 5


def test_the_gateways_guards_are_those_of_its_configuration() -> None:
    router = RouterConfig()
    assert (
        PlannerConfig(
            max_queue_s=GATEWAY_GUARDS.max_queue_s,
            saturation_s=router.saturation_s,
            max_siblings=router.max_siblings,
            queue=router.queue,
            replication=router.hot_prefixes,
        )
        == GATEWAY_GUARDS
    )


def test_sizing_needs_a_clock() -> None:
    trace = conversation()

    def run(replicas: int) -> ReplayReport:
        config = plain(replicas=replicas, window=(0.0, 10.0))
        return report_replay(trace.header, trace.rows, config, bounds=None)

    with pytest.raises(ConfigError, match="--mode order has no latencies"):
        smallest_fleet(run, ttft_p95_s=1.0, max_shed_rate=0.0, most=2)

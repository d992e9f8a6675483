"""Plans: flags in a file, what wins over them, and the ones that come with us."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.cli import main
from sim.traces.writer import write_trace
from tests.sim.replaying import HEADER, row

REPOSITORY = Path(__file__).resolve().parents[2]
PLANS = sorted((REPOSITORY / "configs" / "sim").glob("*"))
COMMAND = re.compile(r"^#     prefixfleet (replay \w+) TRACE --plan (\S+)$", re.M)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten turns of two tenants, a second apart."""
    file = tmp_path / "trace.jsonl"
    rows = [
        row(
            2 + i,
            float(i),
            [100 * (i % 2) + block for block in range(1 + i // 2)],
            tenant=("team-a", "team-b")[i % 2],
            session_id=f"s{i % 2}",
        )
        for i in range(10)
    ]
    write_trace(file, HEADER, rows)
    return file


def planned(folder: Path, text: str) -> str:
    """Write a plan and return its path."""
    file = folder / "plan.yaml"
    file.write_text(text)
    return str(file)


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a replay command that works and return what it prints as JSON."""
    code = main(["replay", *words, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.name)
def test_a_plan_that_comes_with_us_works_with_the_command_that_it_names(
    file: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((command, named),) = COMMAND.findall(file.read_text())
    assert REPOSITORY / named == file
    here = ["--jobs", "1"] if command == "replay search" else []
    code = main([*command.split(), str(trace), "--plan", str(file), *here])
    assert code == 0, capsys.readouterr().err


def test_a_plan_says_what_its_flags_would(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(
        tmp_path,
        "mode: open\njitter: true\nown-views: false\nreplicas: 2\nwindow: 1:10\n"
        "tenant: [team-a:weight=3, team-b:scale=2]\nparam: work_weight=2\n",
    )
    flags = ["--mode", "open", "--jitter", "--replicas", "2", "--window", "1:10"]
    flags += ["--tenant", "team-a:weight=3", "--tenant", "team-b:scale=2"]
    flags += ["--param", "work_weight=2"]
    assert replay(capsys, "run", str(trace), "--plan", plan) == replay(
        capsys, "run", str(trace), *flags
    )


def test_a_list_is_one_flag_or_many_as_the_flag_takes_it(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "replicas: [1, 2]\nblocks: 64\npolicy: [round_robin, prefix_cost:work_weight=1|2]\n"
    plan = planned(tmp_path, text)
    runs = replay(capsys, "search", str(trace), "--plan", plan, "--jobs", "1")["runs"]
    assert [(run["replicas"], run["policy"], run["params"]) for run in runs] == [
        (1, "round_robin", {}),
        (1, "prefix_cost", {"work_weight": 1.0}),
        (1, "prefix_cost", {"work_weight": 2.0}),
        (2, "round_robin", {}),
        (2, "prefix_cost", {"work_weight": 1.0}),
        (2, "prefix_cost", {"work_weight": 2.0}),
    ]


def test_a_flag_beside_the_plan_wins_wherever_it_stands(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, "replicas: 2\nblocks: 64\npolicy: round_robin\n")
    found = replay(capsys, "run", "--blocks", "32", str(trace), f"--plan={plan}")
    assert (found["replicas"], found["blocks"], found["policy"]) == (2, 32, "round_robin")


def test_an_empty_plan_changes_nothing(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, "# nothing yet\n")
    assert replay(capsys, "run", str(trace), "--plan", plan) == replay(capsys, "run", str(trace))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# one\nreplica: 4\n", "plan.yaml:2: unknown key 'replica'; did you mean 'replicas'?"),
        ("ttft-p95: 2\n", "plan.yaml:1: unknown key 'ttft-p95'"),
        ("plan: other.yaml\n", "plan.yaml:1: unknown key 'plan'"),
        ("blocks: 1\nblocks: 2\n", "plan.yaml:2: the key 'blocks' is given twice"),
        ("jitter: 1\n", "plan.yaml:1: jitter: expected true or false"),
        ("replicas:\n", "plan.yaml:1: replicas: expected text, a number, or a list of them"),
        ("tenant: {b: {scale: 2}}\n", "plan.yaml:1: tenant: expected text"),
        ("- mode\n", "plan.yaml: expected flags with their values"),
        ("mode: [open\n", "plan.yaml:2: not valid YAML"),
        ("mode: shut\n", "argument --mode: invalid choice: 'shut'"),
        ("replicas: 0\n", "--replicas: expected a whole number of at least 1"),
    ],
)
def test_a_mistake_in_a_plan_is_told_with_its_place(
    text: str, message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "run", str(trace), "--plan", planned(tmp_path, text)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "none.yaml"], "--plan none.yaml: cannot be read"),
        (["--plan"], "argument --plan: expected one argument"),
    ],
)
def test_a_plan_that_is_not_there_is_told(
    words: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "run", str(trace), *words]) == 2
    assert message in capsys.readouterr().err

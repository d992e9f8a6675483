"""`prefixfleet trace ...` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli import EXIT_USAGE, main
from tests.sim.traces.samples import AZURE, CONVERSATION_1000, MAGAGENT, MINISWE, write_lines

APPROXIMATE = ("--block-size", "16", "--lengths", "approximate")


def run(*words: str | Path) -> int:
    return main(["trace", *map(str, words)])


def test_stats_as_json_has_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", CONVERSATION_1000, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["block_size"]) == (1000, 512)
    assert (found["infinite_hit_blocks"], found["infinite_hit_tokens"]) == (5791, 2962776)
    assert round(found["lru_curve"]["8192"], 4) == 0.1588
    assert round(found["belady_curve"]["1024"], 4) == 0.1570
    assert next(iter(found["lru_curve"])) == "16"
    assert found["lru_curve"]["32768"] == found["belady_curve"]["32768"]


def test_stats_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", CONVERSATION_1000, "--capacities", "4096,8192") == 0
    text = capsys.readouterr().out
    assert "1,000 requests in 330 s, 3.03 requests/s" in text
    assert "note: block size 512, tail 'ceil': all that fits the first 1000 rows" in text
    assert "27,305 references to 21,514 blocks of 512 tokens" in text
    assert "all shared       5,791     0.2121     0.2157     0.2117            0.2717" in text
    assert " 4,096  0.0801  0.2121     0.0933        0.2717" in text


def test_stats_of_a_trace_of_lengths_say_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", AZURE, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["infinite_hit_blocks"]) == (2000, None)
    assert found["lru_curve"] is None


def test_convert_validates_and_writes_the_canonical_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl.gz"
    assert run("convert", MINISWE, *APPROXIMATE, "-o", target, "--source", "mini-swe") == 0
    output = capsys.readouterr()
    assert output.out == f"{target}: 402 requests\n"
    assert "note: lengths are approximate" in output.err
    assert run("stats", target, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["infinite_hit_blocks"]) == ("kvtrace", 141477)


def test_synth_and_overlay_write_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, owned = tmp_path / "drawn.jsonl", tmp_path / "owned.jsonl"
    assert run("synth", CONVERSATION_1000, "-o", drawn, "--requests", "300", "--seed", "3") == 0
    weights = ("--weights", "a=2,b=1", "--isolate")
    assert run("overlay-tenants", drawn, "-o", owned, *weights, "--json") == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == f'{{"file":"{owned}","requests":300}}'
    assert "note: one tenant per branch" in output.err
    assert run("stats", owned, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["tenants"]) == (300, 2)
    assert found["tenant_bound"]["hit_blocks"] == found["infinite_hit_blocks"]


def test_tenants_as_skewed_as_servegen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "chunk-0-trace.csv", "0,9,1,Gamma,1,1")
    write_lines(tmp_path / "chunk-1-trace.csv", "0,1,1,Gamma,1,1")
    target = tmp_path / "out.jsonl"
    words = ("--servegen", tmp_path, "--tenants", "1", "-o", target)
    assert run("overlay-tenants", MAGAGENT, *APPROXIMATE, *words) == 0
    assert "note: one tenant per session" in capsys.readouterr().err
    assert '"tenant":"client-0"' in target.read_text().splitlines()[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["stats", "nowhere"], "nowhere: cannot be read: No such file or directory"),
        (["stats", str(MINISWE)], "state --block-size N --lengths approximate"),
        (["stats", "x", "--capacities", "0"], "--capacities: '0' is not a whole number above 0"),
        (["stats", "x", "--capacities", "many"], "--capacities: 'many' is not a whole number"),
        (["convert", "x"], "the following arguments are required: -o/--output"),
        (["overlay-tenants", "x", "-o", "y"], "one of the arguments --weights --servegen is"),
        (["overlay-tenants", "x", "-o", "y", "--weights", "a"], "'a' is not NAME=WEIGHT"),
        (["synth", "x", "-o", "y", "--prefix-multiplier", "0"], "'0' is not a number above 0"),
        (["replay"], "unknown command 'trace replay'"),
    ],
)
def test_mistakes_are_named(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == EXIT_USAGE
    assert problem in capsys.readouterr().err


def test_results_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Python's own hashes differ from process to process; reports and traces must not."""
    outputs = []
    for seed in ("1", "2"):
        target = tmp_path / f"{seed}.jsonl"
        script = (
            "from router.cli import main\n"
            f"main(['trace', 'synth', {str(MAGAGENT)!r}, '-o', {str(target)!r}, "
            "'--block-size', '16', '--lengths', 'approximate'])\n"
            f"main(['trace', 'stats', {str(CONVERSATION_1000)!r}, '--json'])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        report = done.stdout.split(b"\n", 1)[1]
        outputs.append((report, target.read_bytes()))
    assert len(outputs[0][0]) > 1000
    assert outputs[0] == outputs[1]


def test_the_commands_load_neither_torch_nor_the_gateway() -> None:
    script = (
        "import sys, router.cli, sim.traces.command\n"
        "print(sorted({'torch', 'aiohttp', 'redis', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"

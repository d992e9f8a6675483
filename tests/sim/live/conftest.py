"""A scripted fleet of real processes, for replays to be held against."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.cli import main
from sim.live.shrink import shrunk_header, shrunk_rows
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import open_trace
from sim.traces.writer import write_trace
from tests.e2e.fleet_process import FleetProcess, scripted_config, tiny_folder

TRACES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"
CONVERSATION = TRACES / "conversation_first1000.jsonl.gz"
SYNTHETIC = TRACES / "synthetic_first1000.jsonl.gz"
"""Of the first, every request begins with the same block; of the second, hardly any two do."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the scripted executor can serve."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def scripted_fleet(
    folder: Path,
    model: Path,
    *,
    scripted: dict[str, Any],
    engine: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    tenants: list[dict[str, Any]] | None = None,
) -> Iterator[FleetProcess]:
    """Run a fleet by `prefixfleet up` inside the block; tokens are printable characters."""
    config = scripted_config(model)
    config["fleet"]["scripted"] |= {"vocab_size": 127, **scripted}
    config["engine"] = engine or {}
    config["router"] |= router or {}
    config["tenants"] = tenants or config["tenants"]
    running = FleetProcess(folder, config).start()
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop(signal.SIGTERM)
        running.kill()


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Run the command line here: exit code, decoded output of `--json`, standard error."""
    code = main([*words, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out.strip() else None, printed.err


def validated(
    capsys: pytest.CaptureFixture[str], fleet: FleetProcess, trace: Path, *words: str
) -> tuple[int, Any]:
    """Run `replay validate` on a fleet."""
    code, report, errors = run_command(
        capsys,
        *("replay", "validate", str(trace), "-c", str(fleet.config_file)),
        *("--run-dir", str(fleet.run_dir), "--vocab-size", "127", *words),
    )
    assert report is not None, errors
    return code, report


def first_rows(path: Path, count: int) -> tuple[TraceHeader, list[TraceRow]]:
    """Return the first requests of a trace of 512-token blocks, 32 times shorter."""
    trace = open_trace(path)
    rows = shrunk_rows(itertools.islice(trace.rows(), count), trace.header, 32)
    return shrunk_header(trace.header, 32), list(rows)


def growing_sessions(*, sessions: int, turns: int) -> tuple[TraceHeader, list[TraceRow]]:
    """Return sessions whose prompts grow by 5 blocks of 16 tokens with every turn, and 3 tokens."""
    rows = [
        TraceRow(
            line=2 + sessions * turn + session,
            arrival_s=float(sessions * turn + session),
            input_length=16 * 5 * (turn + 1) + 3,
            output_length=5,
            hash_ids=tuple(range(1000 * session, 1000 * session + 5 * (turn + 1))),
            session_id=f"s{session}",
        )
        for turn in range(turns)
        for session in range(sessions)
    ]
    return TraceHeader(block_size=16, tail="floor"), rows


def written(path: Path, trace: tuple[TraceHeader, list[TraceRow]]) -> Path:
    """Write a trace and return its path."""
    header, rows = trace
    write_trace(path, header, rows)
    return path

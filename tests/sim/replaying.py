"""Builders for replay tests: rows of a made-up trace, fixture traces, and replays of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from sim.config import ReplayConfig
from sim.outcomes import Outcomes
from sim.replay import run_replay
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import Trace, open_trace
from sim.workload import Arrival, Workload

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "traces"
BLOCK_SIZE = 16
HEADER = TraceHeader(block_size=BLOCK_SIZE, tail="floor")


def row(line: int, at_s: float, ids: Sequence[int], **fields: Any) -> TraceRow:
    """Return a request of whole blocks and one token, with an answer of 4 tokens."""
    known: dict[str, Any] = {
        "line": line,
        "arrival_s": at_s,
        "input_length": len(ids) * BLOCK_SIZE + 1,
        "output_length": 4,
        "hash_ids": tuple(ids),
    }
    return TraceRow(**(known | fields))


def config(**fields: Any) -> ReplayConfig:
    """Return a configuration whose engines check their invariants after every step."""
    checked = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_step_s=0.0, check_integrity=True
    )
    known: dict[str, Any] = {"engine": checked, "replicas": 2, "blocks": 64}
    return ReplayConfig(**(known | fields))


def play(rows: Sequence[TraceRow], header: TraceHeader = HEADER, **fields: Any) -> Outcomes:
    """Replay rows under a configuration with these fields."""
    return run_replay(header, lambda: rows, config(**fields))


def fixture(name: str, **stated: Any) -> Trace:
    """Open one of the traces that come with the tests."""
    return open_trace(FIXTURES / name, **stated)


def conversation() -> Trace:
    """Open the first 1,000 requests of the conversation trace."""
    return fixture("conversation_first1000.jsonl.gz")


def arrivals(
    rows: Sequence[TraceRow], header: TraceHeader = HEADER, **fields: Any
) -> list[Arrival]:
    """Return what a fleet would be sent."""
    return list(Workload(header, lambda: rows, config(**fields)))


def plain(**fields: Any) -> ReplayConfig:
    """Return a configuration for fixture traces: large steps, no checks in between."""
    return msgspec.structs.replace(ReplayConfig(), **fields)

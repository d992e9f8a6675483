"""The fixture traces, and small traces written for one test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sim.traces.row import TraceRow
from sim.traces.trace import Trace, open_trace

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "traces"

CONVERSATION = FOLDER / "conversation_trace.jsonl.xz"
CONVERSATION_1000 = FOLDER / "conversation_first1000.jsonl.gz"
SYNTHETIC_1000 = FOLDER / "synthetic_first1000.jsonl.gz"
CLAUDE_CODE = FOLDER / "cc_100sessions_mooncake64.jsonl.xz"
MINISWE = FOLDER / "miniswe_mooncake16.jsonl.xz"
MAGAGENT = FOLDER / "magagent_mooncake16.jsonl.xz"
AZURE = FOLDER / "azure_2023_conv_first2000.csv.gz"

_APPROXIMATE = (MINISWE, MAGAGENT)


def sample(path: Path) -> Trace:
    """Open a fixture trace with what its README says of it."""
    if path in _APPROXIMATE:
        return open_trace(path, block_size=16, lengths="approximate")
    return open_trace(path)


def write_lines(path: Path, *lines: object) -> Path:
    """Write JSON values, or text as it is, one per line."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def header(**fields: object) -> dict[str, object]:
    """Return a canonical header with blocks of 4 tokens."""
    return {"schema": "kvtrace/1", "block_size": 4, "tail": "floor", **fields}


def row(at_ms: float, ids: Sequence[int], **fields: object) -> dict[str, object]:
    """Return a canonical row whose prompt is whole blocks of 4 tokens."""
    return {
        "timestamp": at_ms,
        "input_length": 4 * len(ids),
        "output_length": 1,
        "hash_ids": list(ids),
        **fields,
    }


def trace_rows(*chains: Sequence[int], block_size: int = 4) -> list[TraceRow]:
    """Return rows in memory, a second apart, whose prompts are whole blocks."""
    return [
        TraceRow(
            line=index + 1,
            arrival_s=float(index),
            input_length=block_size * len(chain),
            output_length=1,
            hash_ids=tuple(chain),
        )
        for index, chain in enumerate(chains)
    ]

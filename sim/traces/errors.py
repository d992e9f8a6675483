"""The error of a trace that cannot be what it claims to be: which file, which line, what to do."""

from __future__ import annotations

from pathlib import Path

from kvindex.foundation.errors import PrefixFleetError

EXIT_BAD_INPUT = 2


class TraceError(PrefixFleetError):
    """Raised when a trace file cannot be read or contradicts itself."""

    kind = "trace"
    exit_code = EXIT_BAD_INPUT

    def __init__(self, path: Path, problem: str, *, line: int | None = None) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {problem}")

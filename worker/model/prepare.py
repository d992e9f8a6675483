"""Gets a model folder ready to serve: `python -P -m worker.model.prepare --model demo --json`.

Converts the demo model once, checks any other folder, and says where it is. The result is on
standard output, progress and the one line of an error on standard error. Never imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from worker.config import cache_directory
from worker.model.auto_dtype import auto_dtype
from worker.model.demo import MODEL_NAME, demo_model
from worker.model.folder import ModelFolder, check_model_folder

_PROGRESS_STEP = 0.25
_EXIT_CONFIG = 2
_EXIT_DEPENDENCY = 3


def prepare_model(model: str, *, cache: Path, progress: Callable[[float], None]) -> ModelFolder:
    """Return the checked folder of "demo" or of a path; raises DependencyError or ConfigError."""
    if model == "demo":
        return demo_model(cache, progress=progress)
    return check_model_folder(Path(model))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 (unsupported model) or 3 (missing or damaged model)."""
    parser = argparse.ArgumentParser(prog="prepare", description="Get a model ready to serve.")
    parser.add_argument("--model", required=True, help="'demo' or a Hugging Face folder")
    parser.add_argument("--cache-dir", help="where the converted demo model is kept")
    parser.add_argument("--dtype", help="with --json: say what this precision means here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        folder = prepare_model(
            arguments.model,
            cache=cache_directory(arguments.cache_dir),
            progress=_ProgressLines(sys.stderr.write),
        )
    except (ConfigError, DependencyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_CONFIG if isinstance(error, ConfigError) else _EXIT_DEPENDENCY
    if arguments.json:
        answer = msgspec.to_builtins(folder)
        if arguments.dtype is not None:
            answer["dtype"] = auto_dtype() if arguments.dtype == "auto" else arguments.dtype
        print(msgspec.json.encode(answer).decode())
    else:
        print(f"{folder.model} ({folder.architecture}) is ready in {folder.folder}")
    return 0


class _ProgressLines:
    """Writes a line at every quarter of the conversion."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._next = 0.0

    def __call__(self, done: float) -> None:
        if done >= self._next:
            self._write(f"converting {MODEL_NAME}: {done:.0%}\n")
            self._next += _PROGRESS_STEP


if __name__ == "__main__":
    raise SystemExit(main())

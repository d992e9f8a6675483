"""How far a batch of prompts is, on standard error: a bar, only where a person looks.

It knows no engine; whoever runs the batch says what was done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class BatchProgress:
    """Counts finished choices and generated tokens; shows both."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("generating", total=total, rate="")
        self._num_tokens = 0

    def took(self, num_tokens: int, *, finished: bool) -> None:
        """Note the tokens of one output, and whether it was its choice's last."""
        self._num_tokens += num_tokens
        elapsed_s = self._bar.tasks[self._task].elapsed
        rate = f"{self._num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s else ""
        self._bar.update(self._task, advance=1 if finished else 0, rate=rate)


@contextmanager
def batch_progress(total: int, *, wanted: bool) -> Iterator[BatchProgress]:
    """Show a bar inside the block; nothing where standard error is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not (wanted and sys.stderr.isatty()),
        transient=True,
    )
    with bar:
        yield BatchProgress(bar, total)

"""What a person sees while a fleet starts: one line per phase, with the time it took.

Lines only, no cursor tricks, so that a file or a pipe reads the same as a terminal.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Writes lines stamped with the seconds since the start."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_at

    def say(self, text: str) -> None:
        """Write one line; a reader that went away (a closed pipe) does not stop the fleet."""
        try:
            print(f"[{self.elapsed_s:6.1f} s] {text}", file=self._stream, flush=True)
        except (BrokenPipeError, ValueError):
            self._stream = sys.stderr

    def print(self, text: str) -> None:
        """Write text as it is."""
        try:
            print(text, file=self._stream, flush=True)
        except (BrokenPipeError, ValueError):
            self._stream = sys.stderr

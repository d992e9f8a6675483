"""One log tree, `prefixfleet.*`: a line per record, key=value, on standard error.

It decides where lines go and how they look, and never what is logged. Callers write their fields
into the message (`"event=retry request_id=%s", request_id`), with `quoted` around free text.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]


class KeyValueFormatter(logging.Formatter):
    """Format a record as `time=… level=… [process=…] logger=… message`, on a single line.

    A traceback follows on lines of its own, indented, so that a reader can tell it from records.
    """

    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = f"process={process} " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = (
            f"time={stamp}.{int(record.msecs):03d}Z level={record.levelname.lower()} "
            f"{self._process}logger={record.name}"
        )
        # A client's text may hold line breaks; escaped, it cannot forge a record.
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        if record.exc_info:
            trace = self.formatException(record.exc_info).replace("\n", "\n    ")
            return f"{head} {message}\n    {trace}"
        return f"{head} {message}"


def quoted(text: object) -> str:
    """Return text as the value of a field: bare when simple, else in double quotes."""
    value = str(text)
    if value and not any(c.isspace() or c in '"=' for c in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def setup_logging(
    process: str | None = None, *, level: Level = "info", stream: TextIO | None = None
) -> None:
    """Send the tree `prefixfleet` to `stream` (standard error); a second call replaces the first.

    `process` names this process in every line; None leaves it out, as the log file says it.
    Other libraries' warnings go the same way; their lower levels are dropped.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("prefixfleet").setLevel(level.upper())

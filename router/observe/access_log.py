"""One line per request, key=value, with neither prompt nor key in it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from router.observe.decisions import DecisionRecord

log = logging.getLogger("prefixfleet.access")

_LATE_S = 0.2
_MAX_LINES = 256
_LINE = (
    "request_id=%s path=%s tenant=%s key=%s model=%s status=%d replica=%s attempts=%d "
    "prompt_tokens=%s cached_predicted=%s cached=%s completion_tokens=%s "
    "ttft_ms=%s duration_ms=%.0f"
)
_EVERY_LINE = logging.LogRecord(log.name, logging.INFO, __file__, 0, _LINE, None, None).__dict__


class TogetherHandler(logging.Handler):
    """Writes lines to standard error together, at most 0.2 s late.

    A write for every line costs as much as a tenth of a short request. What is left is written at
    the end of the process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; to be called on the loop's thread alone."""
        self._lines.append(self.format(record))
        if len(self._lines) == 1:
            self._loop.call_later(_LATE_S, self.flush)
        elif len(self._lines) >= _MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what was taken."""
        lines, self._lines = self._lines, []
        if lines:
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


def write_together(loop: asyncio.AbstractEventLoop) -> None:
    """Let the lines of this process leave together; other logs are written at once, as before."""
    handler = TogetherHandler(loop)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    # Lines show none of these, and finding them out takes as long as writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    log.handlers = [handler]
    log.propagate = False


def log_request(record: DecisionRecord, *, path: str, key_alias: str, replica: str | None) -> None:
    """Write the line of a finished request."""
    if not log.isEnabledFor(logging.INFO):
        return
    usage = record.usage
    numbers = (
        usage.prompt_tokens if usage else record.num_prompt_tokens,
        record.num_predicted_tokens,
        usage.cached_tokens if usage else None,
        usage.completion_tokens if usage else None,
    )
    words = (
        record.request_id,
        path,
        record.tenant,
        key_alias or "-",
        record.model or "-",
        record.status,
        replica or "-",
        len(record.attempts),
        *["-" if number is None else number for number in numbers],
        "-" if record.ttft_s is None else f"{record.ttft_s * 1000:.0f}",
        record.duration_s * 1000,
    )
    # What `log.info` does, without finding out what no line of ours shows.
    line, now = logging.LogRecord.__new__(logging.LogRecord), time.time()
    line.__dict__.update(_EVERY_LINE, args=words, created=now, msecs=now % 1 * 1000)
    log.handle(line)


def log_refusal(request_id: str, *, path: str, tenant: str, status: int) -> None:
    """Write the line of a request that was refused before anything of it was understood."""
    log.info("request_id=%s path=%s tenant=%s status=%d", request_id, path, tenant, status)

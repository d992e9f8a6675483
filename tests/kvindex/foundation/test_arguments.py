"""How a command is called, what its help says of defaults, and that describing runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.foundation.arguments import CommandParser, Invocation, parser_of
from kvindex.foundation.command_reference import reference
from kvindex.foundation.errors import ConfigError

DEFAULTS = {"worker.port": "8100", "worker.eager": "false"}


def parser(*words: str) -> CommandParser:
    """Return a parser with an argument of each kind."""
    made = CommandParser(Invocation("key make", words, default_of=DEFAULTS.__getitem__), "Make.")
    made.add_argument("name", help="what to call it")
    made.add_argument("others", nargs="*", help="more of them")
    made.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write")
    made.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between")
    made.add_argument("--kind", choices=("a", "b"), help="which of 100 %% (default: any)")
    made.add_argument("--quiet", action="store_true", help="say nothing")
    made.override("--port", "worker.port", type=int, help="where to listen")
    made.override("--eager", "worker.eager", action="store_true", default=None, help="at once")
    either = made.add_mutually_exclusive_group(required=True)
    either.add_argument("--all", action="store_true", help="all")
    either.add_argument("--some", metavar="N,N|-", help="some")
    group = made.add_argument_group("which fleet")
    group.add_argument("--run-dir", type=Path, metavar="DIR", help="its folder")
    return made


def test_a_call_is_one_line_with_what_must_be_given() -> None:
    assert parser().call == (
        "prefixfleet key make NAME [OTHERS …] --output FILE (--all | --some N,N|-) [options]"
    )


def test_a_command_without_options_says_so() -> None:
    made = CommandParser(Invocation("down", ()), "Stop.")
    assert made.call == "prefixfleet down"


def test_help_tells_defaults_and_the_settings_that_flags_override(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parser("--help").read()
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "usage: prefixfleet key make NAME [OTHERS …] --output FILE",
        "--every SECONDS time between (default 2)",
        "--kind {a,b} which of 100 % (default: any)",
        "--quiet say nothing",
        "--port PORT where to listen (worker.port, default 8100)",
        "--eager at once (worker.eager, default false)",
        "which fleet: --run-dir DIR its folder",
    ):
        assert words in text


def test_a_page_has_a_row_for_each_argument_and_describes_groups_once() -> None:
    page = reference({"key make": ("make a key", parser())}, shared={"--json": "print JSON"})
    rows = page.splitlines()
    for row in (
        "| [key make](#key-make) | make a key |",
        "| `--json` | print JSON |",
        "| `NAME` | what to call it | must be given |",
        "| `-o, --output FILE` | where to write | must be given |",
        "| `--every SECONDS` | time between | `2` |",
        "| `--kind {a,b}` | which of 100 % | any |",
        "| `[OTHERS …]` | more of them |  |",
        "| `--port PORT` | where to listen | `8100`, [`worker.port`](configuration.md#worker) |",
        "| `--some N,N\\|-` | some |  |",
        "And options of several commands: [which fleet](#options-which-fleet).",
        "## Options: which fleet",
        "| `--run-dir DIR` | its folder |  |",
    ):
        assert row in rows


def test_a_command_is_described_without_being_run() -> None:
    def fatal(invocation: Invocation) -> int:
        CommandParser(invocation, "Never do it.").read()
        raise AssertionError("it was done")

    assert parser_of(fatal, Invocation("fatal", ())).description == "Never do it."


def test_a_mistake_names_the_command_and_its_help() -> None:
    with pytest.raises(
        ConfigError, match=r"^key make: .*: name, .*-o/--output; see `prefixfleet key"
    ):
        parser("--all").read()

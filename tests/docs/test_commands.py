"""The reference of commands is the generated one, and every argument in it says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvindex.foundation.arguments import CommandParser, Invocation, is_optional, parser_of
from router.cli import COMMANDS, SHARED_OPTIONS, main
from router.launch.commands_command import page

COMMANDS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


def parser(name: str) -> CommandParser:
    return parser_of(COMMANDS[name].load(), Invocation(name, ()))


def test_the_reference_of_commands_is_what_the_parsers_say() -> None:
    assert COMMANDS_PAGE.read_text() == page(), (
        "run `prefixfleet commands reference > docs/commands.md`"
    )


def test_every_command_has_a_section_and_a_link_to_it() -> None:
    text = COMMANDS_PAGE.read_text()
    for name, command in COMMANDS.items():
        assert f"\n## {name}\n\n`prefixfleet {name}" in text
        assert f"| [{name}](#{name.replace(' ', '-')}) | {command.summary} |" in text


def test_every_link_leads_to_a_heading_of_the_page() -> None:
    text = COMMANDS_PAGE.read_text()
    headings = re.findall(r"^##+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_says_what_it_is(name: str) -> None:
    for _, actions in parser(name).parts():
        for action in actions:
            assert action.help, f"{name}: {action.dest}"
            assert "(default " not in action.help, f"{action.dest}: the default is added to it"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_need_not_be_given_says_what_holds_without_it(name: str) -> None:
    found = parser(name)
    chosen = [
        action
        for group in found._mutually_exclusive_groups
        if group.required
        for action in group._group_actions
    ]
    for _, actions in found.parts():
        for action in actions:
            if is_optional(action) and action.nargs != 0 and found.setting_of(action) is None:
                told = found.default_of(action) or re.search(
                    r" \((default|at first): .*\)$", action.help or ""
                )
                assert told or action in chosen, f"{name}: {action.dest}: {action.help}"


def test_defaults_are_those_of_the_settings_and_of_the_flags() -> None:
    rows = COMMANDS_PAGE.read_text().splitlines()
    port = "port of the API, 0 for a free one"
    assert f"| `--port PORT` | {port} | `8000`, [`router.port`](configuration.md#router) |" in rows
    assert "| `--lines N` | how many lines | `50` |" in rows
    assert "| `-o, --output FILE` | trace to write | must be given |" in rows
    assert (
        "`prefixfleet trace overlay-tenants FILE --output FILE (--weights NAME=W,… | "
        in "".join(rows)
    )


def test_the_help_of_a_command_shows_defaults_and_one_line_of_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main(["engine", "--help"])
        text = capsys.readouterr().out
        assert text.startswith("usage: prefixfleet engine [MODEL] [options]\n\n")
        assert "(worker.port, default 8100)" in " ".join(text.split())


def test_the_shared_options_are_in_the_help_and_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for option, meaning in SHARED_OPTIONS.items():
        assert re.search(rf"^  {option} +{meaning}$", text, re.M)
        assert f"| `{option}` | {meaning} |" in COMMANDS_PAGE.read_text()

"""The reference of settings is the generated one; who comes from elsewhere is told what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvindex.foundation.config_reference import reference
from router.cli import COMMANDS, main
from router.launch.config import SECTIONS
from router.observe.metrics import GatewayMetrics
from tests.docs.terminal import blocks_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
SETTINGS = DOCS / "configuration.md"
COMING_FROM = DOCS / "coming-from.md"


def test_the_reference_of_settings_is_what_the_code_says() -> None:
    assert SETTINGS.read_text() == reference(SECTIONS), (
        "run `prefixfleet config reference > docs/configuration.md`"
    )


def test_a_setting_is_shown_with_its_type_its_bounds_and_its_default() -> None:
    rows = SETTINGS.read_text().splitlines()
    assert "| `port` | integer (at least 0, at most 65535) | `8000` |" in rows
    assert "| `max_siblings` | integer (at least 1) or null | `64` |" in rows
    assert "| `executor` | `model` or `scripted` | `model` |" in rows
    assert "| `certificate` | text | must be given |" in rows


def test_a_struct_that_occurs_twice_is_described_once() -> None:
    page = SETTINGS.read_text()
    assert page.count("| `tokens_per_day` |") == 1
    assert "The same settings as [`tenants[].keys[].limits`](#tenantskeyslimits)." in page


def settings() -> Iterator[str]:
    """Yield every setting by its dotted path, as the reference has it."""
    path = ""
    for line in SETTINGS.read_text().splitlines():
        if heading := re.match(r"##+ `(.+)`", line):
            path = heading[1]
        elif row := re.match(r"\| `(\w+)` \|", line):
            yield f"{path}.{row[1]}"


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("page", ["coming-from.md", "tutorial.md"])
def test_every_setting_that_is_named_exists(page: str) -> None:
    sections = "|".join(name for name in SECTIONS if name != "tenants")
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)`", (DOCS / page).read_text()))
    assert named <= set(settings())


def test_every_limit_and_tenant_setting_that_litellm_users_are_told_exists() -> None:
    table = COMING_FROM.read_text().partition("## LiteLLM")[2].partition("\n## ")[0]
    names = {path.rpartition(".")[2] for path in settings() if path.startswith("tenants[]")}
    right = [line.split(" | ", 1)[1] for line in table.splitlines() if line.startswith("| ")]
    plain = {name for cell in right for name in re.findall(r"`([a-z_]+)`", cell)}
    told = {name for name in plain if not name.startswith("prefixfleet_")}
    assert {"aliases", "requests_per_minute", "tokens_per_month"} <= told <= names | {"limits"}


def test_every_metric_that_is_named_exists() -> None:
    exposed = {
        sample
        for family in GatewayMetrics().registry.collect()
        for sample in (family.name, f"{family.name}_total")
    }
    named = set(re.findall(r"`(prefixfleet_[a-z_]+)`", COMING_FROM.read_text()))
    assert named
    assert named <= exposed


def test_every_flag_that_vllm_users_are_told_is_the_same_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = help_of("engine", capsys)
    rows = re.findall(r"^\| (`--.*?) \| the same", COMING_FROM.read_text(), re.M)
    flags = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)}
    assert len(flags) > 10
    assert flags <= set(re.findall(r"--[a-z-]+", known))


def test_every_flag_of_the_commands_to_paste_exists(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(block.commands for block in blocks_of(COMING_FROM)).replace("\\\n", "")
    commands = re.findall(r"^prefixfleet (.*)$", lines, re.M)
    assert len(commands) == 8
    for words in commands:
        name = next(name for name in COMMANDS if f"{words} ".startswith(f"{name} "))
        known = help_of(name, capsys)
        for flag in re.findall(r" (--[a-z-]+)", words):
            assert flag in re.findall(r"--[a-z-]+", known), f"{name} {flag}"

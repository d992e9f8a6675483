"""What the documentation says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.frontend.errors import KINDS, ErrorShape
from kvindex.hashing import HashScheme, hash_tokens, known_answer, root_hash
from router.cli import COMMANDS
from router.launch.config import load_fleet_config

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])


def table_after(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table that starts with `header`, code marks removed."""
    lines = (REPOSITORY / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_the_error_table_is_that_of_the_code() -> None:
    rows = table_after("docs/errors.md", "| kind | status")
    documented = {
        kind: ErrorShape(int(status), type_, code or None) for kind, status, type_, code, _ in rows
    }
    assert documented == KINDS


def test_the_hash_table_is_what_the_code_computes() -> None:
    scheme = HashScheme(block_size=4)
    first, second = hash_tokens(range(1, 9), scheme)
    salted = hash_tokens(range(1, 5), scheme, cache_salt="tenant-a")[0]
    expected = [root_hash(scheme), first, second, salted, known_answer(HashScheme())]
    rows = table_after("docs/hashing.md", "| what | digest")
    assert [digest for _, digest in rows] == [digest.hex() for digest in expected]


@pytest.mark.fault("router-61")
def test_documented_defaults_are_those_of_the_code() -> None:
    settings = load_fleet_config(None, {}).shown()
    rows = table_after("docs/operations.md", "| setting | default")
    assert len(rows) > 10
    for setting, default, _ in rows:
        section, _, field = setting.partition(".")
        assert str(settings[section][field]) == default, setting


def test_the_readme_opens_with_two_commands() -> None:
    block = re.search(r"```sh\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    assert block is not None
    commands = [line.partition("#")[0].strip() for line in block.group(1).splitlines()]
    assert commands == ["make up", "make test"]


def test_every_make_verb_that_is_named_exists() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
        assert named <= verbs, page.name


def test_every_command_that_is_named_exists() -> None:
    for page in PAGES:
        for first, second in re.findall(
            r"(?:`|bin/)prefixfleet ([a-z]+)(?: ([a-z-]+))?", page.read_text()
        ):
            assert {first, f"{first} {second}"} & set(COMMANDS), f"{page.name}: {first} {second}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_mitigation_of_the_threat_model_has_its_test() -> None:
    rows = table_after("docs/threat-model.md", "| threat (STRIDE)")
    assert {row[0][0] for row in rows} == set("STRIDE")
    for *_, test in rows:
        file, _, name = test.partition("::")
        text = (REPOSITORY / file).read_text()
        assert f"def {name}(" in text, test

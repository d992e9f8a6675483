"""Every known fault of engines and routers is either claimed by a test or listed as open.

The two fault tables have 39 and 61 rows. A test claims a row with `@pytest.mark.fault("engine-17")`
when it shows the right behaviour; `unclaimed.txt` names each other row and the issue that owes it.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
UNCLAIMED = Path(__file__).with_name("unclaimed.txt")
NUM_ROWS = {"engine": 39, "router": 61}
ROWS = {f"{table}-{row}" for table, last in NUM_ROWS.items() for row in range(1, last + 1)}


def claims() -> dict[str, list[str]]:
    """Return the claimed rows, each with the files that claim it, without importing a test."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                for argument in node.args:
                    row = ast.literal_eval(argument)
                    found.setdefault(row, []).append(str(file.relative_to(TESTS)))
    return found


def unclaimed() -> dict[str, str]:
    """Return the listed rows with their reasons."""
    lines = [line for line in UNCLAIMED.read_text().splitlines() if not line.startswith("#")]
    return {row: reason.strip() for row, _, reason in (line.partition(" ") for line in lines)}


def test_every_claimed_row_exists() -> None:
    assert {row: files for row, files in claims().items() if row not in ROWS} == {}


def test_a_row_is_claimed_or_listed_as_open_and_never_both() -> None:
    claimed, listed = set(claims()), set(unclaimed())
    assert sorted(ROWS - claimed - listed) == [], "neither claimed nor in unclaimed.txt"
    assert sorted(claimed & listed) == [], "claimed: remove them from unclaimed.txt"
    assert sorted(listed - ROWS) == [], "no such row"


def test_every_open_row_names_the_issue_that_owes_it() -> None:
    assert [row for row, reason in unclaimed().items() if not reason.startswith("issue ")] == []

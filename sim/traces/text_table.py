"""Rows as an aligned text table: text to the left, numbers to the right, "-" for unknown."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | int | float | None


def text_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a header and one line per row; every row has as many cells as the header."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    numeric = [all(not isinstance(row[column], str) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else value

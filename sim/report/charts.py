"""Charts as markup: lines as inline SVG, bars as elements of a width. No scripts, no fonts.

Colours are classes (`c0` … `c7`; `d1`, `d2` dash what comes after those), so that the page decides
them, also for dark screens and for narrow ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

NUM_COLOURS = 8
NUM_DASHES = 3
_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 40, 34, 44
_NUM_STEPS = 4
_MAX_TICKS = 8

Format = Callable[[float], str]
_Place = Callable[[float, float], tuple[float, float]]
"""From a point of the data to one of the drawing."""


class Line(NamedTuple):
    """One named line through (x, y) points."""

    name: str
    points: Sequence[tuple[float, float]]


class Bar(NamedTuple):
    """One labelled bar of stacked parts, with an optional mark and a text behind it."""

    label: str
    parts: Sequence[float]
    text: str
    mark: float | None = None


def number(value: float) -> str:
    """Return a number as a tick shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share as a tick shows it."""
    return f"{100 * share:.3g} %"


def line_chart(
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    y_format: Format = number,
) -> str:
    """Draw lines over a common scale that begins at 0; `log_x` for capacities."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p class=note>Nothing to draw.</p>"
    xs = [x for x, _ in points]
    low, high = _x(min(xs), log=log_x), _x(max(xs), log=log_x)
    y_ticks = _ticks_over(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (_x(x, log=log_x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM),
        )

    x_ticks = _thinned(sorted(set(xs))) if log_x else _ticks(min(xs), max(xs))
    body = [
        _text(4, 14, y_title),
        _text(_WIDTH - _RIGHT, _HEIGHT - 6, x_title, anchor="end"),
        *(_y_tick(place(xs[0], y)[1], y_format(y)) for y in y_ticks),
        *(
            _text(place(x, 0.0)[0], _HEIGHT - _BOTTOM + 16, number(x), anchor="middle")
            for x in x_ticks
        ),
        *(_drawn(line, i, place, y_format) for i, line in enumerate(lines)),
    ]
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_title)}">'
        f"{''.join(body)}</svg>"
    )
    return svg + legend([line.name for line in lines])


def bar_chart(
    bars: Sequence[Bar], parts: Sequence[str] = (), *, longest: float | None = None
) -> str:
    """Draw horizontal bars over one scale; `parts` names the stacked colours.

    The scale ends at `longest`, or with the longest bar; what goes beyond it is cut and says so.
    """
    if not bars:
        return "<p class=note>Nothing to draw.</p>"
    end = longest or max(max(sum(bar.parts), bar.mark or 0.0) for bar in bars) or 1.0
    rows = "".join(_row(bar, end) for bar in bars)
    return f"<div class=bars>{rows}</div>" + (legend(parts) if parts else "")


def legend(names: Sequence[str]) -> str:
    """Return the colours by name."""
    items = "".join(
        f'<li><span class="key {_colour(i)}"></span>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _row(bar: Bar, end: float) -> str:
    total = sum(bar.parts)
    is_cut = total > end
    shown = [part * end / total for part in bar.parts] if is_cut else bar.parts
    drawn = "".join(
        f'<span class="bar {_colour(i)}" style="width:{100 * part / end:.2f}%"></span>'
        for i, part in enumerate(shown)
    )
    if bar.mark is not None:
        drawn += f'<span class=mark style="left:{100 * bar.mark / end:.2f}%"></span>'
    track = "track cut" if is_cut else "track"
    return (
        f"<span class=label>{escape(bar.label)}</span>"
        f'<span class="{track}">{drawn}</span><span class=value>{escape(bar.text)}</span>'
    )


def _drawn(line: Line, number_of_line: int, place: _Place, y_format: Format) -> str:
    colour = _colour(number_of_line)
    placed = [(point, place(*point)) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for _, (x, y) in placed)
    dots = "".join(
        f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
        f"<title>{escape(line.name)}: {number(point[0])}, {y_format(point[1])}</title></circle>"
        for point, (x, y) in placed
    )
    return f'<polyline class="line {colour}" points="{path}"/>{dots}'


def _colour(i: int) -> str:
    dashes = i // NUM_COLOURS % NUM_DASHES
    return f"c{i % NUM_COLOURS} d{dashes}" if dashes else f"c{i % NUM_COLOURS}"


def _x(x: float, *, log: bool) -> float:
    return math.log2(x) if log else x


def _y_tick(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f"{_text(_LEFT - 6, y + 4, text, anchor='end')}"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return multiples of a round step that lie between two values, both included."""
    step = _step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def _ticks_over(high: float) -> list[float]:
    """Return multiples of a round step from 0 to the first that is not below a value."""
    step = _step(high)
    return [step * i for i in range(max(1, math.ceil(high / step - 1e-9)) + 1)]


def _step(span: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten above a quarter of a span."""
    least = span / _NUM_STEPS
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if least <= step * power * (1 + 1e-9))


def _thinned(values: Sequence[float]) -> Sequence[float]:
    return values[:: -(-len(values) // _MAX_TICKS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

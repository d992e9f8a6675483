"""Charts as inline SVG: lines, stacked bars, plain bars. Text in, text out; no scripts, no fonts.

Colours are classes (`c0` … `c7`), so that the page decides them, also for dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 720, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 36
_BAR, _GAP = 18, 10
_LABEL_WIDTH = 250
_NUM_TICKS = 5


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


_Place = Callable[[float, float], tuple[float, float]]
"""From a point of the data to one of the drawing."""


def line_chart(lines: Sequence[Line], *, x_title: str, y_title: str, log_x: bool = False) -> str:
    """Draw lines over a common scale that begins at 0; `log_x` for capacities."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>Nothing to draw.</p>"
    xs = [_x(x, log=log_x) for x, _ in points]
    low, high = min(xs), max(xs)
    top = _nice(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (_x(x, log=log_x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    body = [_grid(top, y_title), _x_axis(sorted({x for x, _ in points}), place, x_title)]
    for i, line in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        colour = i % NUM_COLOURS
        body.append(f'<polyline class="line c{colour}" points="{path}"/>')
        body += [
            f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
            f"<title>{escape(line.name)}: {_short(point[0])}, {_short(point[1])}</title></circle>"
            for point, (x, y) in ((point, place(*point)) for point in line.points)
        ]
    return _svg(_WIDTH, _HEIGHT, body) + legend([line.name for line in lines])


def bar_chart(bars: Sequence[Bar], parts: Sequence[str] = ()) -> str:
    """Draw horizontal bars, longest scale for all; `parts` names the stacked colours."""
    if not bars:
        return "<p>Nothing to draw.</p>"
    longest = max(max(sum(bar.parts), bar.mark or 0.0) for bar in bars) or 1.0
    room = _WIDTH - _LABEL_WIDTH - 150
    body = []
    for i, bar in enumerate(bars):
        y = _GAP + i * (_BAR + _GAP)
        body.append(_text(_LABEL_WIDTH - 8, y + _BAR - 5, bar.label, anchor="end"))
        x = float(_LABEL_WIDTH)
        for colour, part in enumerate(bar.parts):
            width = part / longest * room
            body.append(
                f'<rect class="bar c{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                f'height="{_BAR}"/>'
            )
            x += width
        if bar.mark is not None:
            at = _LABEL_WIDTH + bar.mark / longest * room
            body.append(
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + _BAR + 3}"/>'
            )
            x = max(x, at)
        body.append(_text(x + 8, y + _BAR - 5, bar.text))
    height = _GAP + len(bars) * (_BAR + _GAP)
    return _svg(_WIDTH, height, body) + (legend(parts) if parts else "")


def legend(names: Sequence[str]) -> str:
    """Return the colours by name."""
    items = "".join(
        f'<li><span class="key c{i % NUM_COLOURS}"></span>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _x(x: float, *, log: bool) -> float:
    return math.log2(x) if log else x


def _grid(top: float, title: str) -> str:
    parts = [_text(4, _TOP - 1, title)]
    for i in range(_NUM_TICKS):
        value = top * i / (_NUM_TICKS - 1)
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * i / (_NUM_TICKS - 1)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, _short(value), anchor="end"))
    return "".join(parts)


def _x_axis(xs: Sequence[float], place: _Place, title: str) -> str:
    step = max(1, len(xs) // 8)
    parts = [
        _text(place(x, 0.0)[0], _HEIGHT - _BOTTOM + 16, _short(x), anchor="middle")
        for x in xs[::step]
    ]
    return "".join(parts) + _text(_WIDTH - _RIGHT, _HEIGHT - 4, title, anchor="end")


def _nice(value: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))


def _short(value: float) -> str:
    if value and abs(value) < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(body)}</svg>'

"""Matrix products of activations with some columns' worth of weights.

Weights are [columns, depth] at an address, in float32 or bfloat16; the arithmetic is float32. Each
element is one dot product in one fixed order, so it does not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call6, pointer
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.vector_code import LANES

PANEL = 3 * LANES
"""Columns computed at a time: a multiple of every tile's columns, and of a vector."""

WIDEN_ROWS = 12
"""From so many rows on, bfloat16 weights are widened once per panel and not once per tile."""


@inner
def multiply(x, num_rows, depth, w, is_half, columns, out, out_stride, adds, tiles, tile, panel):  # type: ignore[no-untyped-def]
    """Set (or add to) out [num_rows, columns] the product of x [num_rows, depth] and weights.

    x, w, out are addresses; rows of out are out_stride floats apart. tile [12] and panel
    [PANEL * depth] are scratch. `columns` is at most PANEL.
    """
    if is_half and num_rows >= WIDEN_ROWS:
        widen(w, panel.ctypes.data, columns * depth)
        w, is_half = np.int64(panel.ctypes.data), np.int64(0)
    size = 2 if is_half else 4
    row = 0
    while row < num_rows:
        left = num_rows - row
        rows, width, shape = (4, 3, 0) if left >= 4 else ((2, 4, 2) if left >= 2 else (1, 8, 4))
        place = x + row * depth * 4
        column = 0
        while column < columns:
            wide = columns - column >= width
            step = width if wide else 1
            function = tiles[2 * (shape if wide else shape + 1) + is_half]
            weights = w + column * depth * size
            call6(function, place, depth, weights, depth, depth, tile.ctypes.data)
            _put(tile, rows, step, out + (row * out_stride + column) * 4, out_stride, adds)
            column += step
        row += rows


@inner
def widen(source, target, count):  # type: ignore[no-untyped-def]
    """Copy bfloat16 numbers to float32; both are addresses."""
    halves = carray(pointer(source), (count,), np.uint16)
    words = carray(pointer(target), (count,), np.uint32)
    for i in range(count):
        words[i] = np.uint32(halves[i]) << np.uint32(16)


@inner
def _put(tile, rows, columns, out, stride, adds):  # type: ignore[no-untyped-def]
    target = carray(pointer(out), (rows, stride), np.float32)
    for r in range(rows):
        for c in range(columns):
            value = tile[r * columns + c]
            if adds:
                value += target[r, c]
            target[r, c] = value

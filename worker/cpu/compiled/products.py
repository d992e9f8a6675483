"""Matrix products of activations with some columns' worth of weights.

Weights are [columns, depth] at an address, stored in one of `tiles.STORAGES`; the arithmetic is
float32. Each element is one dot product in one fixed order, times its column's scale if there is
one, so it does not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call7, pointer
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.tiles import NUM_STORAGES

WIDEN_ROWS = 12
"""From so many rows on, weights are widened once per panel and not once per tile."""

_CODES = np.arange(128)
_EIGHTHS = (_CODES % 8 + np.where(_CODES < 8, 0, 8)) * 2.0 ** (np.maximum(_CODES // 8, 1) - 10)
FLOAT8 = np.concatenate((_EIGHTHS, -_EIGHTHS)).astype(np.float32)
"""What each code of float8_e4m3fn stands for; the two that are no numbers do not occur."""


@inner
def item_bytes(storage):  # type: ignore[no-untyped-def]
    """Return the bytes of a number that is stored in STORAGES[storage]."""
    return 1 if storage > 1 else (2 if storage else 4)


@inner
def multiply(  # type: ignore[no-untyped-def]
    x, num_rows, depth, w, storage, scales, columns, ahead, out, out_stride, adds, tiles, scratch
):
    """Set (or add to) out [num_rows, columns] the product of x [num_rows, depth] and weights.

    x, w, scales, out are addresses; rows of out are out_stride floats apart, and scales is 0 where
    columns have none. Weights that lie `ahead` bytes behind w are asked for meanwhile. scratch is
    (tile [12], panel [PANEL * depth]). `columns` is at most PANEL.
    """
    tile, panel = scratch
    if storage and num_rows >= WIDEN_ROWS:
        widen(w, storage, panel.ctypes.data, columns * depth)
        w, storage, ahead = np.int64(panel.ctypes.data), np.int64(0), np.int64(0)
    size = item_bytes(storage)
    row = 0
    while row < num_rows:
        left = num_rows - row
        rows, width, shape = (4, 3, 0) if left >= 4 else ((2, 4, 2) if left >= 2 else (1, 8, 4))
        place = x + row * depth * 4
        column = 0
        while column < columns:
            wide = columns - column >= width
            step = width if wide else 1
            function = tiles[NUM_STORAGES * (shape if wide else shape + 1) + storage]
            weights = w + column * depth * size
            call7(function, place, depth, weights, depth, depth, tile.ctypes.data, weights + ahead)
            if scales:
                _scale(tile, rows, step, scales + column * 4)
            _put(tile, rows, step, out + (row * out_stride + column) * 4, out_stride, adds)
            column += step
        row += rows


@inner
def widen(source, storage, target, count):  # type: ignore[no-untyped-def]
    """Copy numbers in a narrower storage to float32; both are addresses."""
    numbers = carray(pointer(target), (count,), np.float32)
    if storage == 1:
        words = carray(pointer(target), (count,), np.uint32)
        halves = carray(pointer(source), (count,), np.uint16)
        for i in range(count):
            words[i] = np.uint32(halves[i]) << np.uint32(16)
    elif storage == 2:
        whole = carray(pointer(source), (count,), np.int8)
        for i in range(count):
            numbers[i] = np.float32(whole[i])
    else:
        codes = carray(pointer(source), (count,), np.uint8)
        for i in range(count):
            numbers[i] = FLOAT8[codes[i]]


@inner
def _scale(tile, rows, columns, scales):  # type: ignore[no-untyped-def]
    factors = carray(pointer(scales), (columns,), np.float32)
    for r in range(rows):
        for c in range(columns):
            tile[r * columns + c] *= factors[c]


@inner
def _put(tile, rows, columns, out, stride, adds):  # type: ignore[no-untyped-def]
    target = carray(pointer(out), (rows, stride), np.float32)
    for r in range(rows):
        for c in range(columns):
            value = tile[r * columns + c]
            if adds:
                value += target[r, c]
            target[r, c] = value

"""Matrix products of activations with some columns' worth of weights.

Weights are [columns, depth] at an address, stored in one of `tiles.STORAGES`; the arithmetic is
float32. Each element is one dot product in one fixed order, times its column's scale if there is
one, so it does not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call6, pointer
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.sizes import STREAMS
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
def streams_for(num_rows):  # type: ignore[no-untyped-def]
    """Return at how many places a weight is read side by side.

    Few rows wait for memory: each column of their first tile is a stream of its own then.
    """
    if num_rows >= WIDEN_ROWS:
        return 1
    return 3 if num_rows >= 4 else (4 if num_rows >= 2 else STREAMS)


@inner
def multiply(  # type: ignore[no-untyped-def]
    x, num_rows, depth, weight, columns, target, tiles, scratch
):
    """Set (or add to) an output [num_rows, columns] the product of x [num_rows, depth] and weights.

    weight is (address, storage, address of scales or 0). `columns` is (streams, apart, count):
    column s * apart + i is computed for each s < streams and i < count, with streams as
    `streams_for` has them, or 1. Memory is read soonest where a tile's columns are streams of
    their own, far apart. target is (address, floats between rows, floats between streams, adds).
    scratch is (tile, panel); a panel holds all the columns, from WIDEN_ROWS rows on.
    """
    tile, panel = scratch
    w, storage, scales = weight
    streams, between, count = columns
    out, stride, apart, adds = target
    one = np.int64(1)
    if storage and num_rows >= WIDEN_ROWS:
        wide = panel.ctypes.data
        for stream in range(streams):
            place = w + stream * between * depth * item_bytes(storage)
            widen(place, storage, wide + stream * count * depth * 4, count * depth)
        w, storage, between = np.int64(wide), np.int64(0), count
    row = 0
    while row < num_rows:
        left = num_rows - row
        rows, width, shape = (4, 3, 0) if left >= 4 else ((2, 4, 2) if left >= 2 else (1, 8, 4))
        line = x + row * depth * 4, depth
        first = out + row * stride * 4
        function = tiles[NUM_STORAGES * shape + storage]
        single = tiles[NUM_STORAGES * (shape + 1) + storage]
        if width == streams:
            source = w, storage, scales, between, columns[1]
            goal = first, stride, apart, adds
            _run_tiles(function, line, source, goal, (rows, width), count, one, tile)
        else:
            num_wide = count // width
            behind = num_wide * width
            for stream in range(streams):
                place = w + stream * between * depth * item_bytes(storage)
                factors = scales + stream * columns[1] * 4 if scales else scales
                begin = first + stream * apart * 4
                source, goal = (place, storage, factors, one, one), (begin, stride, one, adds)
                many = np.int64(width)
                _run_tiles(function, line, source, goal, (rows, width), num_wide, many, tile)
                place += behind * depth * item_bytes(storage)
                factors = factors + behind * 4 if scales else scales
                source = place, storage, factors, one, one
                goal = begin + behind * 4, stride, one, adds
                _run_tiles(single, line, source, goal, (rows, 1), count - behind, one, tile)
        row += rows


@inner
def _run_tiles(function, line, weight, target, shape, num_tiles, advance, tile):  # type: ignore[no-untyped-def]
    """Compute tiles of some columns each; one begins `advance` columns behind another.

    A tile's columns are `between` apart in the weight, and `apart` in its scales and the output.
    """
    x, depth = line
    w, storage, scales, between, scales_apart = weight
    out, stride, apart, adds = target
    rows, width = shape
    column_bytes = depth * item_bytes(storage)
    for i in range(num_tiles):
        at = i * advance
        call6(function, x, depth, w + at * column_bytes, between * depth, depth, tile.ctypes.data)
        if scales:
            _scale(tile, rows, width, scales + at * 4, scales_apart)
        _put(tile, rows, width, out + at * 4, stride, apart, adds)


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
def _scale(tile, rows, columns, scales, apart):  # type: ignore[no-untyped-def]
    factors = carray(pointer(scales), (columns, apart), np.float32)
    for r in range(rows):
        for c in range(columns):
            tile[r * columns + c] *= factors[c, 0]


@inner
def _put(tile, rows, columns, out, stride, apart, adds):  # type: ignore[no-untyped-def]
    for r in range(rows):
        target = carray(pointer(out + r * stride * 4), (columns, apart), np.float32)
        for c in range(columns):
            value = tile[r * columns + c]
            if adds:
                value += target[c, 0]
            target[c, 0] = value

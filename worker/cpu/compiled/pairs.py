"""Products of bfloat16 activations with panels of bfloat16 weights, summed up in float32.

See pair_tiles.py for how panels lie in memory. Each element is one sum in one order, pair by pair,
so it does not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call3, call4, call8, pointer
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.pair_tiles import HADAMARD, PANEL_SHAPES, ROUND, SPLIT
from worker.cpu.compiled.tiles import PAIRS
from worker.cpu.compiled.vector_code import LANES

_FEW = 32
"""Up to so many rows wait for panels: they are read at several places side by side then."""


@inner
def pair_streams(num_rows):  # type: ignore[no-untyped-def]
    """Return at how many places panels are read side by side; see products.streams_for."""
    return 4 if num_rows <= _FEW else 1


@inner
def multiply_panels(x, num_rows, depth, panels, columns, target, tiles):  # type: ignore[no-untyped-def]
    """Set (or add to) an output [num_rows, columns] the product of x [num_rows, depth] and panels.

    `columns` is (streams, apart, count), as products.multiply has them, but multiples of LANES.
    target is (address, floats between rows, floats between streams, adds).
    """
    streams, between, count = columns
    out, stride, apart, adds = target
    row = 0
    while row < num_rows:
        rows, wide = _highest(num_rows - row)
        line, place = x + row * depth * 2, out + row * stride * 4
        first = PAIRS + (len(PANEL_SHAPES) if adds else 0)
        column = 0
        while column < count:
            # Side by side lie streams, or the panels of one of them.
            if streams == 4:
                tile, step, w_apart, out_apart = wide, LANES, between * depth, apart
            elif count - column >= 4 * LANES:
                tile, step, w_apart, out_apart = wide, 4 * LANES, LANES * depth, LANES
            else:
                tile, step, w_apart, out_apart = wide + 1, LANES, 0, 0
            w, o = panels + column * depth * 2, place + column * 4
            call8(tiles[first + tile], line, depth, w, w_apart, depth, o, stride, out_apart)
            column += step
        row += rows


@inner
def _highest(num_rows):  # type: ignore[no-untyped-def]
    """Return (rows, place) of the highest tile of four panels for so many rows, see PANEL_SHAPES.

    Behind it stands that of one panel.
    """
    if num_rows >= 6:
        return 6, 0
    if num_rows >= 4:
        return 4, 2
    return (2, 4) if num_rows >= 2 else (1, 6)


@inner
def round_to_half(numbers, count, out, tiles):  # type: ignore[no-untyped-def]
    """Write `count` float32 numbers to an address in bfloat16; both are addresses."""
    call3(tiles[PAIRS + ROUND], numbers, count, out)


@inner
def split_in_halves(numbers, count, out, rest, tiles):  # type: ignore[no-untyped-def]
    """Do what round_to_half does; what it leaves over goes to `rest`, see pair_tiles.split_row."""
    call4(tiles[PAIRS + SPLIT], numbers, count, out, rest)


@inner
def transform(rows, tiles):  # type: ignore[no-untyped-def]
    """Transform contiguous rows in place, see pair_tiles.hadamard_row."""
    start = rows.ctypes.data
    call3(tiles[PAIRS + HADAMARD], start, rows.size, start)


@inner
def round_finely(numbers, channels, out, tiles):  # type: ignore[no-untyped-def]
    """Write an array to an address in bfloat16, and behind it what that lost of some channels.

    The array is overwritten.
    """
    count, num_fine = numbers.shape[0], channels.shape[0]
    start = numbers.ctypes.data
    split_in_halves(start, count, out, start, tiles)
    rest = carray(pointer(start), (count,), np.uint16)
    fine = carray(pointer(out + count * 2), (num_fine,), np.uint16)
    for i in range(num_fine):
        fine[i] = rest[channels[i]]

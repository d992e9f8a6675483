"""The innermost loops where a CPU multiplies pairs of bfloat16 and adds them up in float32.

A matrix [columns, depth] lies in panels of LANES columns, each [depth / 2, LANES, 2]: what one
instruction multiplies is one vector of memory, and a lane is a column, so no sum crosses lanes.
Addresses are in bytes, strides and counts in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.cpu.compiled.loop_code import loop, loop_over, size, starts
from worker.cpu.compiled.vector_code import (
    LANES,
    Builder,
    Value,
    hadamard,
    load,
    load_pair_everywhere,
    load_pairs,
    multiply_pairs,
    splat,
    store,
    store_half,
    transposed,
    zip_halves,
)
from worker.cpu.hadamard import HADAMARD_SIZE

PANEL_SHAPES = ((6, 4), (6, 1), (4, 4), (4, 1), (2, 4), (2, 1), (1, 4), (1, 1))
"""Rows, and panels, of the tiles that multiply."""

ROUND = 2 * len(PANEL_SHAPES)
SPLIT = ROUND + 1
HADAMARD = SPLIT + 1
ZIP = HADAMARD + 1
TURN = ZIP + 1
NUM_PAIR_TILES = TURN + 1
"""Where each kind begins in the order of `pair_tiles`: panel tiles that set, then that add."""

_FLOAT_BYTES, _HALF_BYTES = 4, 2
_VECTOR_BYTES = LANES * _FLOAT_BYTES

Body = Callable[[Builder, Sequence[Value]], None]


def pair_tiles() -> list[tuple[int, Body]]:
    """Return every tile with the number of its arguments, in order."""
    panels = [(8, panel_tile(r, v, adds)) for adds in (False, True) for r, v in PANEL_SHAPES]
    rows = [(3, round_row), (4, split_row), (3, hadamard_row), (4, zip_rows), (4, turn_rows)]
    return [*panels, *rows]


def panel_tile(num_rows: int, num_panels: int, adds: bool) -> Body:
    """Write f(x, x_stride, w, w_apart, depth, out, out_stride, out_apart).

    out[r, p * out_apart + c] is set to, or increased by, the sum over k of x[r, k] * w[p][c, k];
    x is bfloat16, panels of w begin w_apart elements apart. The sum goes pair by pair.
    """

    def body(builder: Builder, args: Sequence[Value]) -> None:
        x, x_stride, w, w_apart, depth, out, out_stride, out_apart = args
        rows = starts(builder, x, x_stride, num_rows, _HALF_BYTES)
        panels = starts(builder, w, w_apart, num_panels, _HALF_BYTES)
        lines = starts(builder, out, out_stride, num_rows, _FLOAT_BYTES)
        places = [p for line in lines for p in starts(builder, line, out_apart, num_panels, 4)]

        def step(k: Value, acc: list[Value]) -> list[Value]:
            x_offset = builder.mul(k, size(_HALF_BYTES))
            w_offset = builder.mul(k, size(LANES * _HALF_BYTES))
            weights = [load_pairs(builder, builder.add(panel, w_offset)) for panel in panels]
            for r, row in enumerate(rows):
                pair = load_pair_everywhere(builder, builder.add(row, x_offset))
                for p, weight in enumerate(weights):
                    i = r * num_panels + p
                    acc[i] = multiply_pairs(builder, pair, weight, acc[i])
            return acc

        initial = [load(builder, p) if adds else splat(0.0) for p in places]
        for total, place in zip(loop(builder, depth, 2, initial, step), places, strict=True):
            store(builder, total, place)

    return body


def round_row(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(numbers, count, out): out in bfloat16, rounded to the nearest even."""
    numbers, count, out = args

    def step(k: Value) -> None:
        value = load(builder, builder.add(numbers, builder.mul(k, size(_FLOAT_BYTES))))
        store_half(builder, value, builder.add(out, builder.mul(k, size(_HALF_BYTES))))

    loop_over(builder, count, LANES, step)


def split_row(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(numbers, count, out, rest): out as round_row has it, rest what that left over.

    The rest is rounded too, and may take the place of the numbers.
    """
    numbers, count, out, rest = args

    def step(k: Value) -> None:
        offset = builder.mul(k, size(_HALF_BYTES))
        place = builder.add(out, offset)
        value = load(builder, builder.add(numbers, builder.mul(k, size(_FLOAT_BYTES))))
        store_half(builder, value, place)
        left = builder.fsub(value, load(builder, place, "bfloat16"))
        store_half(builder, left, builder.add(rest, offset))

    loop_over(builder, count, LANES, step)


def hadamard_row(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(numbers, count, out): the Walsh-Hadamard transform of each HADAMARD_SIZE numbers.

    It multiplies lengths by the root of HADAMARD_SIZE. out may be where the numbers are.
    """
    numbers, count, out = args

    def step(k: Value) -> None:
        offset = builder.mul(k, size(_FLOAT_BYTES))
        base, target = builder.add(numbers, offset), builder.add(out, offset)
        num_vectors, apart = HADAMARD_SIZE // LANES, size(LANES)
        places = starts(builder, base, apart, num_vectors, _FLOAT_BYTES)
        results = starts(builder, target, apart, num_vectors, _FLOAT_BYTES)
        vectors = hadamard(builder, [load(builder, place) for place in places])
        for vector, result in zip(vectors, results, strict=True):
            store(builder, vector, result)

    loop_over(builder, count, HADAMARD_SIZE, step)


def zip_rows(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(rows, count, out, out_apart): two rows of `count` bfloat16 become pairs.

    They are of two depths: vectors of pairs go to panels that are out_apart elements apart.
    """
    rows, count, out, out_apart = args
    second = builder.add(rows, builder.mul(count, size(_HALF_BYTES)))

    def step(k: Value) -> None:
        offset = builder.mul(k, size(_HALF_BYTES))
        pairs = zip_halves(builder, builder.add(rows, offset), builder.add(second, offset))
        panel = builder.mul(builder.udiv(k, size(LANES)), out_apart)
        store(builder, pairs, builder.add(out, builder.mul(panel, size(_HALF_BYTES))))

    loop_over(builder, count, LANES, step)


def turn_rows(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(rows, stride, depth, out): LANES rows of bfloat16, the columns, become a panel.

    depth is a multiple of 2 * LANES.
    """
    rows, stride, depth, out = args
    places = starts(builder, rows, stride, LANES, _HALF_BYTES)

    def step(k: Value) -> None:
        offset = builder.mul(k, size(_HALF_BYTES))
        pairs = transposed(builder, [load(builder, builder.add(place, offset)) for place in places])
        base = builder.add(out, builder.mul(k, size(LANES * _HALF_BYTES)))
        for i, vector in enumerate(pairs):
            store(builder, vector, builder.add(base, size(i * _VECTOR_BYTES)))

    loop_over(builder, depth, 2 * LANES, step)

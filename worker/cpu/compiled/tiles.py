"""The innermost loops, written in LLVM's language and compiled once for this CPU.

Compiled code calls them by address. Addresses are in bytes, strides and counts in elements; results
are float32. Depths and widths must be multiples of LANES. Nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from worker.cpu.compiled.loop_code import either, loop, size, starts
from worker.cpu.compiled.pair_tiles import NUM_PAIR_TILES, pair_tiles
from worker.cpu.compiled.vector_code import (
    ITEM_BYTES,
    LANES,
    MULTIPLIES_PAIRS,
    Builder,
    Storage,
    Value,
    exponential,
    fma,
    greatest,
    head_of,
    larger,
    load,
    load_everywhere,
    splat,
    store,
    sums,
)

DOT_SHAPES = ((4, 3), (4, 1), (2, 4), (2, 1), (1, 8), (1, 1), (3, 4), (3, 1), (1, 4))
"""Rows and columns of the tiles that multiply, each over every storage in turn."""

MIX_SHAPES = ((3, 4), (3, 1), (1, 4), (1, 1))
"""Rows, and vectors per row, of the tiles that mix, each over float32 and then over bfloat16."""

STORAGES: tuple[Storage, ...] = ("float32", "bfloat16", "int8", "float8")
NUM_STORAGES = len(STORAGES)

MIX = NUM_STORAGES * len(DOT_SHAPES)
SOFTMAX = MIX + 2 * len(MIX_SHAPES)
SILU = SOFTMAX + 1
LARGEST = SILU + 1
PAIRS = LARGEST + 1
NUM_TILES = PAIRS + NUM_PAIR_TILES
"""Where each kind begins in the order of `write_tiles`; pairs are there only if a CPU has them."""

_FLOAT_BYTES = 4
_VECTOR_BYTES = LANES * _FLOAT_BYTES

Body = Callable[[Builder, Sequence[Value]], None]


def write_tiles() -> tuple[ir.Module, list[str]]:
    """Return a module with every tile, and the names of its functions in order."""
    module = ir.Module("tiles")
    bodies = [(6, dot_tile(r, c, kind)) for r, c in DOT_SHAPES for kind in STORAGES]
    bodies += [(7, mix_tile(r, v, kind)) for r, v in MIX_SHAPES for kind in STORAGES[:2]]
    bodies += [(4, softmax_row), (4, silu_product), (3, largest_score)]
    if MULTIPLIES_PAIRS:
        bodies += pair_tiles()
    names = [f"tile_{i}" for i in range(len(bodies))]
    for name, (num_arguments, body) in zip(names, bodies, strict=True):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_arguments)
        function = ir.Function(module, kind, name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(builder, function.args)
        builder.ret_void()
    return module, names


def dot_tile(num_rows: int, num_columns: int, storage: Storage) -> Body:
    """Write f(x, x_stride, w, w_stride, depth, out): out[r, c] = sum of x[r, k] * w[c, k].

    x is float32, w is in `storage`; out [num_rows, num_columns] without gaps.
    """

    def body(builder: Builder, args: Sequence[Value]) -> None:
        x, x_stride, w, w_stride, depth, out = args
        rows = starts(builder, x, x_stride, num_rows, _FLOAT_BYTES)
        columns = starts(builder, w, w_stride, num_columns, ITEM_BYTES[storage])

        def step(k: Value, acc: list[Value]) -> list[Value]:
            x_offset = builder.mul(k, size(_FLOAT_BYTES))
            w_offset = builder.mul(k, size(ITEM_BYTES[storage]))
            weights = [load(builder, builder.add(w, w_offset), storage) for w in columns]
            for r, row in enumerate(rows):
                value = load(builder, builder.add(row, x_offset))
                for c, weight in enumerate(weights):
                    i = r * num_columns + c
                    acc[i] = fma(builder, value, weight, acc[i])
            return acc

        zeros = [splat(0.0)] * (num_rows * num_columns)
        totals = _unrolled(builder, depth, zeros, step)
        for first in range(0, len(totals), LANES):
            part = totals[first : first + LANES]
            result = head_of(builder, sums(builder, part), len(part))
            store(builder, result, builder.add(out, size(first * _FLOAT_BYTES)))

    return body


def mix_tile(num_rows: int, num_vectors: int, storage: Storage) -> Body:
    """Write f(p, p_stride, v, v_stride, count, out, out_stride): out[r] += sum of p[r, j] * v[j].

    p is float32, v is in `storage`; rows of out are num_vectors * LANES wide.
    """

    def body(builder: Builder, args: Sequence[Value]) -> None:
        p, p_stride, v, v_stride, count, out, out_stride = args
        weights = starts(builder, p, p_stride, num_rows, _FLOAT_BYTES)
        results = starts(builder, out, out_stride, num_rows, _FLOAT_BYTES)
        v_bytes = builder.mul(v_stride, size(ITEM_BYTES[storage]))
        places = [
            builder.add(row, size(d * _VECTOR_BYTES)) for row in results for d in range(num_vectors)
        ]

        def step(j: Value, acc: list[Value]) -> list[Value]:
            at = builder.add(v, builder.mul(j, v_bytes))
            offset = builder.mul(j, size(_FLOAT_BYTES))
            factors = [load_everywhere(builder, builder.add(row, offset)) for row in weights]
            for d in range(num_vectors):
                skip = size(d * LANES * ITEM_BYTES[storage])
                value = load(builder, builder.add(at, skip), storage)
                for r, factor in enumerate(factors):
                    i = r * num_vectors + d
                    acc[i] = fma(builder, factor, value, acc[i])
            return acc

        totals = loop(builder, count, 1, [load(builder, place) for place in places], step)
        for total, place in zip(totals, places, strict=True):
            store(builder, total, place)

    return body


def softmax_row(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(scores, count, largest, total): scores = e**(scores - largest), total their sum."""
    scores, count, largest, total = args
    shift = load_everywhere(builder, largest)

    def step(k: Value, acc: list[Value]) -> list[Value]:
        place = builder.add(scores, builder.mul(k, size(_FLOAT_BYTES)))
        value = exponential(builder, builder.fsub(load(builder, place), shift))
        store(builder, value, place)
        return [builder.fadd(acc[0], value)]

    (sum_,) = loop(builder, count, LANES, [splat(0.0)], step)
    store(builder, head_of(builder, sums(builder, [sum_]), 1), total)


def silu_product(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(gate, up, out, count): out = gate * sigmoid(gate) * up; out may be gate."""
    gate, up, out, count = args

    def step(k: Value, acc: list[Value]) -> list[Value]:
        offset = builder.mul(k, size(_FLOAT_BYTES))
        g = load(builder, builder.add(gate, offset))
        smallest = builder.select(builder.fcmp_ordered("<", g, splat(-86.0)), splat(-86.0), g)
        decay = exponential(builder, builder.fsub(splat(0.0), smallest))
        sigmoid = builder.fdiv(splat(1.0), builder.fadd(splat(1.0), decay))
        u = load(builder, builder.add(up, offset))
        store(builder, builder.fmul(builder.fmul(g, sigmoid), u), builder.add(out, offset))
        return acc

    loop(builder, count, LANES, [], step)


def largest_score(builder: Builder, args: Sequence[Value]) -> None:
    """Write f(scores, count, largest): largest = the largest of itself and the scores."""
    scores, count, largest = args

    def step(k: Value, acc: list[Value]) -> list[Value]:
        value = load(builder, builder.add(scores, builder.mul(k, size(_FLOAT_BYTES))))
        return [larger(builder, acc[0], value)]

    (found,) = loop(builder, count, LANES, [load_everywhere(builder, largest)], step)
    store(builder, head_of(builder, greatest(builder, found), 1), largest)


def _unrolled(
    builder: Builder,
    depth: Value,
    initial: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """Run body(k, carried) for k = 0, LANES, ... below depth, two vectors per round."""

    def pair(k: Value, carried: list[Value]) -> list[Value]:
        return body(builder.add(k, size(LANES)), body(k, carried))

    even = builder.and_(depth, size(-2 * LANES))
    whole = either(
        builder,
        builder.icmp_signed(">", even, size(0)),
        initial,
        lambda: loop(builder, even, 2 * LANES, initial, pair),
    )
    is_odd = builder.icmp_signed("!=", even, depth)
    return either(builder, is_odd, whole, lambda: body(even, list(whole)))

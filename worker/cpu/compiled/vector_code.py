"""Writes LLVM code over vectors of float32: what the compiled tiles are made of.

Every sum has one fixed order whatever the tile's shape, so a row's result does not depend on the
rows beside it. It knows no model and no shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from llvmlite import binding, ir

Storage = Literal["float32", "bfloat16", "int8", "float8"]
"""float8 is float8_e4m3fn; what is stored in it must be numbers."""

ITEM_BYTES: dict[Storage, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "float8": 1}

LINE_BYTES = 64
"""Of the cache."""

_FEATURES = binding.get_host_cpu_features()

LANES = 16 if _FEATURES.get("avx512f") else 8
"""float32 numbers per vector register of this CPU."""

MULTIPLIES_PAIRS = LANES == 16 and bool(_FEATURES.get("avx512bf16"))
"""Whether this CPU multiplies vectors of bfloat16, adding neighbours up in float32."""

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
VECTOR = ir.VectorType(_FLOAT, LANES)
_INTEGERS = ir.VectorType(_INT32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
"""A vector of pairs of bfloat16, as many as float32 numbers fit into it."""

_EXP_LOWEST = -87.0
"""e to less than this is taken as zero: it is below what float32 holds at full precision."""

_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3)
_EXP2_LOW = (5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0)
"""2**f for f in [-0.5, 0.5], highest power first (Cephes, Moshier 1989, exp2f)."""

_FOR_READING, _INTO_SECOND_LEVEL, _DATA = 0, 2, 1
"""What llvm.prefetch is told."""

Builder = Any
Value = Any


def splat(number: float) -> Value:
    """Return a constant vector."""
    return ir.Constant(VECTOR, [number] * LANES)


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Return a * b + c, rounded once."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.fma.v{LANES}f32"
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, [a, b, c])


def load(builder: Builder, address: Value, storage: Storage = "float32") -> Value:
    """Load a vector from an address, widened to float32, which is exact."""
    if storage == "float32":
        return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)
    if storage == "bfloat16":
        high = builder.shl(_load_halves(builder, address), _everywhere(16))
        return builder.bitcast(high, VECTOR)
    raw = builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)
    if storage == "int8":
        return builder.sitofp(builder.sext(raw, _INTEGERS), VECTOR)
    return _widened_float8(builder, builder.sext(raw, _INTEGERS))


def _load_halves(builder: Builder, address: Value) -> Value:
    """Load LANES numbers of 16 bits as integers of 32."""
    raw = builder.load(builder.inttoptr(address, _HALVES.as_pointer()), align=2)
    return builder.zext(raw, _INTEGERS)


def _widened_float8(builder: Builder, codes: Value) -> Value:
    """Return what float8_e4m3fn codes stand for.

    Exponent and mantissa are moved to where float32 has them. Codes without an exponent stand for
    eighths of 2**-6 and come out as 2**-7 and as many eighths of it; float32 of the same kind would
    be a hundred times slower.
    """
    shifted = builder.shl(codes, _everywhere(20))
    magnitude = builder.and_(shifted, _everywhere(0x7F << 20))
    normal = builder.bitcast(builder.add(magnitude, _everywhere(120 << 23)), VECTOR)
    rest = builder.fsub(normal, splat(2.0**-7))
    is_small = builder.fcmp_ordered("<", normal, splat(2.0**-6))
    value = builder.select(is_small, builder.fadd(rest, rest), normal)
    sign = builder.and_(shifted, _everywhere(-(1 << 31)))
    return builder.bitcast(builder.or_(builder.bitcast(value, _INTEGERS), sign), VECTOR)


def load_pairs(builder: Builder, address: Value) -> Value:
    """Load a vector of pairs of bfloat16; a pair is as wide as a number, and lies like one."""
    return builder.bitcast(load(builder, address), _PAIRS)


def load_pair_everywhere(builder: Builder, address: Value) -> Value:
    """Load one pair of bfloat16 into every lane."""
    return builder.bitcast(load_everywhere(builder, address), _PAIRS)


def multiply_pairs(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Return c plus the sum of the two products of each lane's pairs, in float32."""
    signature = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, [c, a, b])


def store_half(builder: Builder, value: Value, address: Value) -> None:
    """Store a vector rounded to bfloat16, to the nearest even."""
    bits = builder.bitcast(value, _INTEGERS)
    last = builder.and_(builder.lshr(bits, _everywhere(16)), _everywhere(1))
    rounded = builder.add(builder.add(bits, _everywhere(0x7FFF)), last)
    quiet = builder.or_(bits, _everywhere(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    halves = builder.trunc(builder.lshr(kept, _everywhere(16)), _HALVES)
    builder.store(halves, builder.inttoptr(address, _HALVES.as_pointer()), align=2)


def zip_halves(builder: Builder, a: Value, b: Value) -> Value:
    """Load LANES bfloat16 at each of two addresses; return them as pairs, in place of numbers."""
    low, high = _load_halves(builder, a), _load_halves(builder, b)
    return builder.bitcast(builder.or_(low, builder.shl(high, _everywhere(16))), VECTOR)


def transposed(builder: Builder, vectors: Sequence[Value]) -> list[Value]:
    """Return the columns of LANES vectors, in log2(LANES) rounds of exchanges."""
    level, step = list(vectors), 1
    while step < LANES:
        lower = [i if not i & step else LANES + (i ^ step) for i in range(LANES)]
        upper = [i | step if not i & step else LANES + i for i in range(LANES)]
        following = list(level)
        for i in range(LANES):
            if not i & step:
                a, b = level[i], level[i | step]
                following[i] = _shuffle(builder, a, b, lower)
                following[i | step] = _shuffle(builder, a, b, upper)
        level, step = following, step * 2
    return level


def hadamard(builder: Builder, vectors: Sequence[Value]) -> list[Value]:
    """Return the Walsh-Hadamard transform of all lanes of 2**n vectors, in Sylvester's order."""
    level, step = list(vectors), 1
    while step < LANES:
        signs = ir.Constant(VECTOR, [-1.0 if i & step else 1.0 for i in range(LANES)])
        others = [i ^ step for i in range(LANES)]
        level = [fma(builder, v, signs, _shuffle(builder, v, v, others)) for v in level]
        step *= 2
    step = 1
    while step < len(level):
        for i in range(len(level)):
            if not i & step:
                a, b = level[i], level[i | step]
                level[i], level[i | step] = builder.fadd(a, b), builder.fsub(a, b)
        step *= 2
    return level


def greatest(builder: Builder, vector: Value) -> Value:
    """Return a vector's largest number in every lane; what is no number is passed over."""
    step = 1
    while step < LANES:
        other = _shuffle(builder, vector, vector, [i ^ step for i in range(LANES)])
        vector = larger(builder, vector, other)
        step *= 2
    return vector


def larger(builder: Builder, a: Value, b: Value) -> Value:
    """Return the larger of two numbers in each lane; the first where one of them is none."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def prefetch(builder: Builder, address: Value) -> None:
    """Ask for a line of memory that will be read soon; any address will do, nothing is touched."""
    pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, *[_INT32] * 3])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    options = [_INT32(_FOR_READING), _INT32(_INTO_SECOND_LEVEL), _INT32(_DATA)]
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def store(builder: Builder, value: Value, address: Value) -> None:
    """Store a vector, or a shorter one, of float32."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def load_everywhere(builder: Builder, address: Value) -> Value:
    """Load one float32 into every lane."""
    scalar = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, _INT32(0))
    return _shuffle(builder, one, one, [0] * LANES)


def sums(builder: Builder, vectors: Sequence[Value]) -> Value:
    """Return a vector with the sum of each of at most LANES vectors, zeros behind them.

    Lanes are added pairwise, neighbours first.
    """
    level = [*vectors, *[splat(0.0)] * (LANES - len(vectors))]
    width = LANES  # partial sums per vector that was put in
    while width > 1:
        even = [i for i in range(0, 2 * LANES, 2)]
        odd = [i for i in range(1, 2 * LANES, 2)]
        level = [
            builder.fadd(
                _shuffle(builder, level[i], level[i + 1], even),
                _shuffle(builder, level[i], level[i + 1], odd),
            )
            for i in range(0, len(level), 2)
        ]
        width //= 2
    return level[0]


def head_of(builder: Builder, vector: Value, count: int) -> Value:
    """Return the first lanes of a vector as a shorter vector."""
    return _shuffle(builder, vector, vector, list(range(count)))


def exponential(builder: Builder, x: Value) -> Value:
    """Return e**x lane by lane, for x up to 88; zero where x is below -87, NaN for NaN."""
    scaled = builder.fmul(x, splat(1.4426950408889634))
    clamped = builder.select(
        builder.fcmp_unordered("<", scaled, splat(-126.0)), splat(-126.0), scaled
    )
    shifted = builder.fadd(clamped, splat(12582912.0))  # 1.5 * 2**23 rounds to an integer
    fraction = builder.fsub(clamped, builder.fsub(shifted, splat(12582912.0)))
    power: Value = splat(_EXP2[0])
    for coefficient in (*_EXP2[1:], *_EXP2_LOW):
        power = fma(builder, power, fraction, splat(coefficient))
    exponent = builder.shl(
        builder.bitcast(shifted, _INTEGERS), ir.Constant(_INTEGERS, [23] * LANES)
    )
    bits = builder.add(builder.bitcast(power, _INTEGERS), exponent)
    result = builder.bitcast(bits, VECTOR)
    result = builder.select(builder.fcmp_ordered("<", x, splat(_EXP_LOWEST)), splat(0.0), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def _everywhere(number: int) -> Value:
    return ir.Constant(_INTEGERS, [number] * LANES)


def _shuffle(builder: Builder, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)

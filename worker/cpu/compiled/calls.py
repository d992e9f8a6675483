"""What compiled code needs beyond numba's own language: pointers, calls by address, prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.cpu.compiled.vector_code import Builder, Value, prefetch


def _call(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
    function, *values = args
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(builder.inttoptr(function, kind.as_pointer()), values)
    return context.get_dummy_value()


@intrinsic
def call3(typing, function, a, b, c):  # type: ignore[no-untyped-def]
    """Call the function of three integers at an address."""
    return types.void(*[types.intp] * 4), _call


@intrinsic
def call4(typing, function, a, b, c, d):  # type: ignore[no-untyped-def]
    """Call the function of four integers at an address."""
    return types.void(*[types.intp] * 5), _call


@intrinsic
def call6(typing, function, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """Call the function of six integers at an address."""
    return types.void(*[types.intp] * 7), _call


@intrinsic
def call7(typing, function, a, b, c, d, e, f, g):  # type: ignore[no-untyped-def]
    """Call the function of seven integers at an address."""
    return types.void(*[types.intp] * 8), _call


@intrinsic
def call8(typing, function, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """Call the function of eight integers at an address."""
    return types.void(*[types.intp] * 9), _call


@intrinsic
def pointer(typing, address):  # type: ignore[no-untyped-def]
    """Return an address as a pointer to anything."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), code


@intrinsic
def ask_for(typing, address):  # type: ignore[no-untyped-def]
    """Ask for the line of memory at an address, which will be read soon."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), code

"""How the threads of a step share its work: counters that they claim units from.

A stage is done when all its units are, whoever computed them, so a thread that the operating
system holds back delays nobody unless it holds a unit, or has not told yet what it computed.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.sizes import COUNTER_BYTES
from worker.cpu.compiled.vector_code import Builder, Value

_SPINS = 2000
"""Looks at a counter, with a pause after each, before the thread lets others have its core."""

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _add(typing, address, number):  # type: ignore[no-untyped-def]
    """Add to the 64-bit integer at an address; return what it was."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.intp(types.intp, types.intp), code


@intrinsic
def _look(typing, address):  # type: ignore[no-untyped-def]
    """Read the 64-bit integer at an address, and see all that was written before it."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.intp(types.intp), code


@intrinsic
def _pause(typing):  # type: ignore[no-untyped-def]
    """Tell an x86 core that this is a waiting loop; nothing on others."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        if platform.machine() in ("x86_64", "AMD64"):
            function = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), code


@inner
def next_unit(step, stage, thread, turn, num_units):  # type: ignore[no-untyped-def]
    """Claim a unit of a stage; return (turn, unit), with a unit of num_units when none is left.

    A thread takes those of its own part one after the other, so that it reads memory in order, and
    then helps with the other parts. `turn` says how many parts it has seen the end of, at first 0.
    """
    place = _counters(step, stage) + COUNTER_BYTES
    num_parts = step.num_parts
    size = (num_units + num_parts - 1) // num_parts
    while turn < num_parts:
        part = (thread + turn) % num_parts
        unit = part * size + _add(place + part * COUNTER_BYTES, np.int64(1))
        if unit < min((part + 1) * size, num_units):
            return turn, unit
        turn += 1
    return turn, num_units


@inner
def finish(step, stage, num_done, num_units):  # type: ignore[no-untyped-def]
    """Report units that this thread has computed; return when all units of the stage are."""
    place = _counters(step, stage)
    if num_done:
        _add(place, num_done)
    spins = 0
    while _look(place) < num_units:
        if spins < _SPINS:
            spins += 1
            _pause()
        else:
            _yield_core()


@inner
def _counters(step, stage):  # type: ignore[no-untyped-def]
    return step.counters + stage * (step.num_parts + 1) * COUNTER_BYTES

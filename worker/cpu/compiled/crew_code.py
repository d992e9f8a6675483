"""How the threads of a step share its work: counters that they claim units from.

A stage is done when all its units are, whoever computed them, so a thread that the operating
system holds back delays nobody unless it holds a unit.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.sizes import STAGE_BYTES
from worker.cpu.compiled.vector_code import Builder, Value

_DONE = STAGE_BYTES // 2
_SPINS = 2000
"""Looks at a counter, with a pause after each, before the thread lets others have its core."""

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _increment(typing, address):  # type: ignore[no-untyped-def]
    """Add one to the 64-bit integer at an address; return what it was."""

    def code(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "seq_cst")

    return types.intp(types.intp), code


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
def claim(counters, stage):  # type: ignore[no-untyped-def]
    """Return the next unit of a stage; it may be beyond the last."""
    return _increment(counters + stage * STAGE_BYTES)


@inner
def finish(counters, stage):  # type: ignore[no-untyped-def]
    """Report a claimed unit as computed."""
    _increment(counters + stage * STAGE_BYTES + _DONE)


@inner
def wait(counters, stage, num_units):  # type: ignore[no-untyped-def]
    """Return when all units of a stage are computed."""
    place = counters + stage * STAGE_BYTES + _DONE
    spins = 0
    while _look(place) < num_units:
        if spins < _SPINS:
            spins += 1
            _pause()
        else:
            _yield_core()

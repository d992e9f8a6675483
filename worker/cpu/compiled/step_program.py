"""Has numba write the step as LLVM code; this is where numba is loaded.

Only what is compiled anew needs it: code that was kept runs without.
"""

from __future__ import annotations

import ctypes

from llvmlite import binding
from numba import carray, njit, types
from numba.np import numpy_support

from worker.cpu.compiled.inner import OPTIONS
from worker.cpu.compiled.object_code import Program
from worker.cpu.compiled.step import run
from worker.cpu.compiled.step_record import STEP

_FREES_NOTHING = "define void @NRT_MemInfo_call_dtor(ptr) { ret void }"
"""For the last user of an array that numba has made; the step makes none."""


def write_step() -> Program:
    """Return a program of one function, f(result, error, address of a step record, thread).

    The first two are addresses of eight bytes that mean nothing. It takes seconds.
    """
    record = types.CPointer(numpy_support.from_dtype(STEP))
    kinds = (record, types.intp)
    entry = njit(types.void(*kinds), **OPTIONS)(_entry)
    module = binding.parse_assembly(entry.inspect_llvm(kinds))
    module.link_in(binding.parse_assembly(_FREES_NOTHING))
    _require_no_numba(module)
    return Program(str(module), [entry.overloads[kinds].fndesc.llvm_func_name])


def _entry(step, thread):  # type: ignore[no-untyped-def]
    run(carray(step, (1,))[0], thread)


def _require_no_numba(module: binding.ModuleRef) -> None:
    """Make sure that the code calls nothing that only numba would bring along."""
    process = ctypes.CDLL(None)
    for function in module.functions:
        is_outside = function.is_declaration and not function.name.startswith("llvm.")
        assert not is_outside or hasattr(process, function.name), function.name

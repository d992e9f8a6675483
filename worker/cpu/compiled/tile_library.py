"""Compiles the tiles into this process, or loads the object code that an earlier start has kept."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir

from worker.cpu.compiled.tiles import write_tiles

_keeps_code_alive: list[binding.ExecutionEngine] = []


@cache
def tile_addresses(folder: Path | None) -> npt.NDArray[np.int64]:
    """Return the addresses of the tiles, in order; their code is kept in `folder`, if given."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )
    module, names = write_tiles()
    module.triple = machine.triple
    engine = binding.create_mcjit_compiler(_parsed(module), machine)
    if folder is not None:
        _keep_object(engine, folder / f"tiles-{_digest(f'{cpu} {features}')}.o")
    engine.finalize_object()
    _keeps_code_alive.append(engine)
    return np.array([engine.get_function_address(name) for name in names], np.int64)


def _parsed(module: ir.Module) -> binding.ModuleRef:
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    return parsed


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep_object(engine: binding.ExecutionEngine, file: Path) -> None:
    """Read object code from a file if it is there, else write it there when it is compiled."""

    def compiled(module: binding.ModuleRef, code: bytes) -> None:
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(code)
        partial.replace(file)

    def wanted(module: binding.ModuleRef) -> bytes | None:
        return file.read_bytes() if file.is_file() else None

    engine.set_object_cache(compiled, wanted)

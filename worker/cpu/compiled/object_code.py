"""Machine code in this process: made by LLVM for this CPU, or loaded as an earlier start kept it.

It does not know what the functions do, nor who writes them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding

_DIGEST_BYTES = 32
_COMPILERS = ("llvmlite", "numba")
_keeps_code_alive: list[binding.ExecutionEngine] = []


class Program(NamedTuple):
    """LLVM code, and the names of those of its functions that are to be called."""

    assembly: str
    names: Sequence[str]


class _Machine(NamedTuple):
    """Machine code; the names are those of its program."""

    names: list[str]
    code: bytes


def function_addresses(
    name: str, write: Callable[[], Program], *, folder: Path | None
) -> tuple[int, ...]:
    """Return where the functions of a program are, in order; they stay for good.

    What `write` returns is compiled, unless machine code of that name for this CPU is kept in
    `folder`. Whoever changes the program must take another folder.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    file = None if folder is None else folder / f"{name}-{_host()}.o"
    machine = None if file is None else _kept(file)
    if machine is None:
        program = write()
        machine = _Machine(list(program.names), _compiled(program.assembly))
        if file is not None:
            _keep(file, machine)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target())
    engine.add_object_file(binding.ObjectFileRef.from_data(machine.code))
    engine.finalize_object()
    _keeps_code_alive.append(engine)
    return tuple(engine.get_function_address(each) for each in machine.names)


def is_kept(name: str, folder: Path) -> bool:
    """Tell whether code of that name for this CPU is kept in a folder."""
    return (folder / f"{name}-{_host()}.o").is_file()


def _host() -> str:
    """Return a digest of what machine code depends on besides its program."""
    versions = [f"{each} {importlib.metadata.version(each)}" for each in _COMPILERS]
    cpu = [binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    return hashlib.sha256("\n".join([*versions, *cpu]).encode()).hexdigest()[:16]


def _target() -> binding.TargetMachine:
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def _compiled(assembly: str) -> bytes:
    machine = _target()
    module = binding.parse_assembly(assembly)
    module.triple = machine.triple
    module.verify()
    code: bytes = machine.emit_object(module)
    return code


def _kept(file: Path) -> _Machine | None:
    """Read what `_keep` wrote; None when there is nothing, or when it is damaged."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    names, _, code = rest.partition(b"\n")
    return _Machine(names.decode().split(), code)


def _keep(file: Path, machine: _Machine) -> None:
    content = " ".join(machine.names).encode() + b"\n" + machine.code
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(hashlib.sha256(content).digest() + content)
    partial.replace(file)

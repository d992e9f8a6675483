"""Compiles every launch of the kernels for real GPUs, on a machine that needs none.

    python -m tests.worker.gpu.compile_kernels TARGET PRECISION

TARGET is a compute capability such as 90, PRECISION a dtype of torch. Prints one
JSON object per launch: kernel, bytes of shared memory, registers per thread, bytes of local memory
(spills). Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import worker.kernels.jit as jit

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class _Driver:
    """Stands for a GPU of one compute capability; nothing is ever launched on it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def launches(dtype: torch.dtype) -> None:
    """Call every kernel with shapes of real models; head sizes 64, 128 and 256."""
    from worker.kernels import decode_attention, prefill_attention, rms_norm, rotary, sampling
    from worker.kernels.silu_and_mul import silu_and_mul
    from worker.kernels.store_kv import store_kv

    for heads, kv_heads, size in ((9, 3, 64), (32, 8, 128), (4, 1, 256)):
        qkv = torch.zeros(32, heads + 2 * kv_heads, size, dtype=dtype)
        cache = torch.zeros(8, 16, kv_heads, size, dtype=dtype)
        positions = torch.zeros(32, dtype=torch.int32)
        rotary.rotate(qkv, positions, torch.zeros(2, 64, size // 2), num_rotated=heads + kv_heads)
        store_kv(qkv[:, heads:-kv_heads], qkv[:, -kv_heads:], cache, cache, positions)
        paged: dict[str, Any] = {
            "block_tables": torch.zeros(4, 16, dtype=torch.int32),
            "context_lens": torch.zeros(4, dtype=torch.int32),
            "out": torch.zeros(32, heads, size, dtype=dtype),
        }
        start = torch.zeros(5, dtype=torch.int32)
        prefill_attention.prefill_attention(
            qkv[:, :heads], cache, cache, query_start=start, **paged
        )
        paged["out"] = paged["out"][:4]
        for splits in (1, 32):
            decode_attention.decode_attention(
                qkv[:4, :heads], cache, cache, num_splits=splits, **paged
            )
    for hidden in (576, 8192):
        x = torch.zeros(4, hidden, dtype=dtype)
        rms_norm.rms_norm(x, x[0], 1e-5)
        rms_norm.add_rms_norm(x, x, x[0], 1e-5)
        silu_and_mul(torch.zeros(4, 2 * hidden, dtype=dtype))
    for vocab in (128_256,):
        zeros = torch.zeros(4, dtype=torch.int64)
        draws = sampling.Draws(torch.zeros(4), zeros, zeros, zeros)
        sampling.sample_tokens(torch.zeros(4, vocab), draws, zeros)


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of local memory of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(_CUOBJDUMP), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = re.search(r"REG:(\d+)", done.stdout)
    local = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", done.stdout)
    assert registers, done.stdout
    assert local, done.stdout
    return int(registers[1]), int(local[1]) + int(local[2])


def main() -> None:
    """Compile for one target, in one precision."""
    driver.set_active(_Driver(int(sys.argv[1])))
    knobs.runtime.interpret = False
    jit.check_launchable = lambda *_: None
    seen: set[str] = set()

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = kernel.warmup(*arguments, grid=grid, **options)
            if compiled.hash in seen:
                return
            seen.add(compiled.hash)
            registers, local = resources(compiled.asm["cubin"])
            found = {
                "kernel": kernel.__name__,
                "shared": compiled.metadata.shared,
                "registers": registers,
                "local": local,
            }
            print(json.dumps(found), flush=True)

        return launch

    JITFunction.__getitem__ = functools.partialmethod(compile_only)
    launches(getattr(torch, sys.argv[2]))


if __name__ == "__main__":
    main()

"""How the kernels of this package become Triton programs, with types that a checker can follow.

It knows no kernel. Where TRITON_INTERPRET=1 was set before Triton was first imported, programs run
in Triton's interpreter, on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import triton
from triton import knobs


class Kernel(Protocol):
    """A program to be launched over a grid; inside another program it is called directly."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the launcher for a grid."""
        ...

    def __call__(self, *arguments: Any) -> Any:
        """Stand for the call inside another program; never executed by Python."""
        ...


def kernel(*, varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Turn a function into a kernel; it is compiled anew for each kind of argument.

    `varying` names integers that change from step to step: those are not specialised, because a
    value of 1 or a multiple of 16 would otherwise cost a compilation of its own under traffic.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        return cast(Kernel, triton.jit(function, do_not_specialize=list(varying)))

    return decorate


def is_interpreted() -> bool:
    """Tell whether kernels run in Triton's interpreter instead of on a GPU."""
    return bool(knobs.runtime.interpret)


def check_launchable(*tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors on which a kernel would be silently wrong.

    Triton's interpreter miscomputes bfloat16; compiled programs would read CPU pointers.
    """
    for tensor in tensors:
        if is_interpreted():
            if tensor.dtype == torch.bfloat16:
                raise ValueError(
                    "Triton's interpreter is wrong in bfloat16; use float32 or float16"
                )
        elif tensor.device.type != "cuda":
            raise ValueError(f"a compiled kernel cannot read a tensor on {tensor.device}")


def check_contiguous(*tensors: torch.Tensor) -> None:
    """Assert that kernels may compute addresses without strides."""
    for tensor in tensors:
        assert tensor.is_contiguous(), "a tensor is not contiguous"


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)

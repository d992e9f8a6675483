"""The precisions a model runs in, and which one "auto" means on this machine."""

from __future__ import annotations

import torch

from kvindex.foundation.errors import ConfigError
from worker.cpu.machine import has_native_bfloat16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(dtype: str) -> torch.dtype:
    """Turn a setting into a torch dtype.

    "auto" is bfloat16 where the CPU multiplies bfloat16 matrices natively, else float32: without
    such instructions a prefill in bfloat16 takes longer than in float32, and so does a batch of
    decodes; only a single decode stream gains, because it reads half as many bytes.
    Raises ConfigError for a name that is neither.
    """
    if dtype == "auto":
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported, only auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype as the configuration spells it."""
    return str(dtype).removeprefix("torch.")

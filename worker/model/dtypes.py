"""The precisions a model runs in, and which one "auto" means on this machine."""

from __future__ import annotations

import torch

from kvindex.foundation.errors import ConfigError
from worker.model.auto_dtype import auto_dtype

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(dtype: str) -> torch.dtype:
    """Turn a setting into a torch dtype.

    "auto" is what `auto_dtype` says. Raises ConfigError for a name that is none.
    """
    if dtype == "auto":
        dtype = auto_dtype()
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported, only auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype as the configuration spells it."""
    return str(dtype).removeprefix("torch.")

"""How functions are compiled that only compiled code calls: without what Python would need."""

from __future__ import annotations

from typing import Any

from numba import njit

OPTIONS = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "boundscheck": False,
}

inner: Any = njit(**OPTIONS)
"""Decorator. Such functions raise nothing, and divide as numpy does."""

inner_sums: Any = njit(fastmath={"reassoc", "contract"}, **OPTIONS)
"""The same, with sums over lanes; an order of its own, but one, for each function."""

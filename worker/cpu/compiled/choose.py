"""Decides whether a model of some shape runs compiled; loads numba only if it does."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

from worker.model.config import ModelConfig

logger = logging.getLogger("prefixfleet.worker.compiled")


def runs_compiled(config: ModelConfig) -> bool:
    """Tell whether the compiled step covers this model here: numba is there, and widths fit."""
    if not _numba_is_installed():
        return False
    from worker.cpu.compiled.forward import can_compile

    return can_compile(config)


def runs_in_pairs(config: ModelConfig) -> bool:
    """Tell whether a compiled step in bfloat16 multiplies with this CPU's own instructions."""
    from worker.cpu.compiled.forward import can_pair

    return can_pair(config)


@cache
def _numba_is_installed() -> bool:
    if importlib.util.find_spec("numba") is not None:
        return True
    logger.warning("numba is not installed: models run in plain torch operations, which are slower")
    return False

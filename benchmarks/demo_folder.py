"""The model that a benchmark takes when it is given none: the demo's, converted at first use."""

from __future__ import annotations

from pathlib import Path

from worker.config import cache_directory
from worker.model.demo import demo_model


def demo_folder() -> Path:
    """Return the folder of the demo model; raise DependencyError when its package is missing."""
    return Path(demo_model(cache_directory(None), progress=_silent).folder)


def _silent(_: float) -> None:
    """Show no progress."""

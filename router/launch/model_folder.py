"""Gets the model ready before any replica starts, in a process of its own.

The work (finding, converting, checking) is the worker's; this module starts it, shows its progress
and reads its answer.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.die_with_parent import wrap
from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from router.launch.config import FleetConfig

_EXIT_CONFIG = 2
_ERROR = "error: "


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model is, what it is called, and what its precision comes to on this machine.

    Other fields of the answer are not needed here.
    """

    folder: str
    model: str
    dtype: str


def chosen_model(config: LoadedConfig, *, say: Callable[[str], None]) -> PreparedModel:
    """Return the model that a configuration asks for; raises what `prepare_model` does."""
    worker = config.plain("worker")
    if config.section("fleet", FleetConfig).executor == "scripted" and worker["model"] != "demo":
        return scripted_model(worker["model"], dtype=worker["dtype"])
    return prepare_model(
        worker["model"], dtype=worker["dtype"], cache_dir=worker["cache_dir"], say=say
    )


def prepare_model(
    model: str, *, dtype: str, cache_dir: str | None, say: Callable[[str], None]
) -> PreparedModel:
    """Return the folder of a model, "demo" or a path; takes about 10 s at the very first time.

    Raises ConfigError or DependencyError with the one line that the preparation ended with.
    """
    argv = [sys.executable, "-P", "-m", "worker.model.prepare", "--model", model, "--json"]
    argv += ["--dtype", dtype]
    if cache_dir is not None:
        argv += ["--cache-dir", cache_dir]
    with subprocess.Popen(
        wrap(argv, signal.SIGKILL), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        said = list(_relayed(process.stderr, say))
        answer = process.stdout.read()
    if process.returncode != 0:
        reason = said[-1] if said else f"model preparation ended with {process.returncode}"
        error: type[PrefixFleetError] = (
            ConfigError if process.returncode == _EXIT_CONFIG else DependencyError
        )
        raise error(reason.removeprefix("prefixfleet: ").removeprefix(_ERROR))
    try:
        return msgspec.json.decode(answer, type=PreparedModel)
    except msgspec.DecodeError as error:
        raise DependencyError(f"model preparation answered {answer[:200]!r}: {error}") from None


def scripted_model(model: str, *, dtype: str) -> PreparedModel:
    """Return a folder that needs a tokenizer only, for the scripted executor."""
    folder = Path(model).expanduser().absolute()
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: no tokenizer.json; the scripted executor needs a tokenizer")
    return PreparedModel(folder=str(folder), model=folder.name, dtype=dtype)


def _relayed(stream: IO[str], say: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of a stream that say something, each shown as it comes, but for an error."""
    for line in stream:
        text = line.strip()
        if text:
            if not text.startswith(_ERROR):  # The last word of the process; the caller says it.
                say(f"  {text}")
            yield text

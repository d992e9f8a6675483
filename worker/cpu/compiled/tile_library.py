"""The tiles in this process, as an array of addresses that compiled code picks from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.cpu.compiled.object_code import Program, function_addresses
from worker.cpu.compiled.tiles import write_tiles


@cache
def tile_addresses(folder: Path | None) -> npt.NDArray[np.int64]:
    """Return the addresses of the tiles, in order; their code is kept in `folder`, if given."""
    return np.array(function_addresses("tiles", _written, folder=folder), np.int64)


def _written() -> Program:
    module, names = write_tiles()
    return Program(str(module), names)

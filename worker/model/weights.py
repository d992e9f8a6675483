"""Reads a folder's safetensors: headers without torch, tensors by memory map.

It knows neither architectures nor precisions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvindex.foundation.errors import DependencyError
from worker.model.config import read_json

if TYPE_CHECKING:
    import torch

_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20


class StoredTensor(NamedTuple):
    """What a file says of a tensor; `dtype` as safetensors names it ("BF16")."""

    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, sharded or not, sorted by name.

    Raises DependencyError when there are none, or when one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DependencyError(f"{folder} has no *.safetensors file; only safetensors are loaded")
    for file in files:
        if not file.is_file():
            raise DependencyError(f"{index} names {file.name}, which is missing")
    return files


def tensor_names(file: Path) -> list[str]:
    """Return the names in a safetensors file; see `stored_tensors`."""
    return list(stored_tensors(file))


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; see `stored_tensors`."""
    return {name: tensor.shape for name, tensor in stored_tensors(file).items()}


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return what a safetensors file holds, from its header.

    Raises DependencyError when the header is damaged or the file is shorter than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        head = stream.read(length) if length <= size else b""
    try:
        header = json.loads(head)
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        tensors = {
            name: StoredTensor(str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DependencyError(f"{file} is no safetensors file, or it is damaged") from error
    if _LENGTH_BYTES + length + end != size:
        raise DependencyError(
            f"{file} is truncated: {size} bytes, its header promises {_LENGTH_BYTES + length + end}"
        )
    return tensors


def weights_digest(folder: Path) -> str:
    """Return the sha256 (hex) over every byte of the weights; about 1 GB/s."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


class WeightSource:
    """Tensors of a folder by name; each is handed out as stored, mapped from the file.

    `take` raises DependencyError naming folder and tensor when it is missing or misshapen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, StoredTensor] = {}
        self._file_of: dict[str, Path] = {}
        for file in weight_files(folder):
            tensors = stored_tensors(file)
            self._entries |= tensors
            self._file_of |= dict.fromkeys(tensors, file)
        self._taken: set[str] = set()
        self._open: dict[Path, object] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def stored_dtype(self, name: str) -> str | None:
        """Return the precision of a tensor in its file, None when it is missing."""
        entry = self._entries.get(name)
        return None if entry is None else entry.dtype

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor of numbers with a fraction, whose shape must be `shape`."""
        tensor = self._shaped(name, shape)
        if not tensor.is_floating_point():
            raise DependencyError(
                f"{self.folder}: tensor {name} is stored in {self.stored_dtype(name)}, and "
                "config.json does not say how it is quantized"
            )
        return tensor

    @property
    def num_tensors(self) -> int:
        """Tensors in the files."""
        return len(self._entries)

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors of the files."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    def dtypes(self) -> set[str]:
        """Return the precisions that the files hold, as safetensors names them ("BF16")."""
        return {entry.dtype for entry in self._entries.values()}

    def untaken(self) -> Iterator[str]:
        """Yield the names that nobody asked for."""
        return (name for name in self._file_of if name not in self._taken)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor as it is stored, whose shape must be `shape`."""
        tensor = self._stored(name)
        if tuple(tensor.shape) != shape:
            raise DependencyError(
                f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {shape}"
            )
        return tensor

    def _stored(self, name: str) -> torch.Tensor:
        """Return one tensor, whatever its shape."""
        from safetensors import safe_open

        file = self._file_of.get(name)
        if file is None:
            raise DependencyError(f"{self.folder}: tensor {name} is missing from the weights")
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor: torch.Tensor = self._open[file].get_tensor(name)  # type: ignore[attr-defined]
        self._taken.add(name)
        return tensor

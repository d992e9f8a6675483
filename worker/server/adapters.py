"""The LoRA adapters that a replica serves, each as a model name of its own.

A folder is checked when it is given its name; the runner loads it when a request first needs it.
It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.frontend.errors import RequestError
from engine.messages import LoRARequest
from kvindex.foundation.errors import ConfigError
from kvindex.registry import ServedAdapter
from worker.model.adapter_folder import check_adapter_folder
from worker.model.config import read_model_config


class ServedAdapters:
    """Adapters by name; `model_folder` None (no weights here) leaves their shapes unchecked.

    `taken_names` are those of the model itself; `num_ranks` processes share it.
    """

    def __init__(
        self, *, model_folder: Path | None, taken_names: tuple[str, ...], num_ranks: int = 1
    ) -> None:
        self._num_ranks = num_ranks
        self._model_folder = model_folder
        self._taken_names = taken_names
        self._by_name: dict[str, LoRARequest] = {}
        self._digests: dict[tuple[str, str], str] = {}

    def __iter__(self) -> Iterator[LoRARequest]:
        """List them in the order in which they came."""
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> LoRARequest | None:
        """Return the adapter that is served under a name."""
        return self._by_name.get(name)

    def check(self, name: str, path: str) -> LoRARequest:
        """Check a folder for a name; it is read, so this may block.

        ConfigError or DependencyError say what is wrong. The path that counts, in block hashes
        too, is the absolute one.
        """
        if not name or name in self._taken_names:
            raise ConfigError(f"adapter {name!r}: the name is empty or the model's own")
        if self._num_ranks > 1:
            raise ConfigError(
                f"adapter {name!r}: adapters are served by one rank, "
                f"tensor_parallel_size is {self._num_ranks}"
            )
        model = None if self._model_folder is None else read_model_config(self._model_folder)
        folder = Path(path).expanduser().absolute()
        checked = check_adapter_folder(folder, model)
        return LoRARequest(name, str(folder), checked.digest)

    def is_stale(self, adapter: LoRARequest) -> bool:
        """Tell whether other weights were served under the same name and path before.

        Block hashes cover name and path, so what those weights have left in the cache is in the
        way.
        """
        known = self._digests.get((adapter.name, adapter.path))
        return known is not None and known != adapter.digest

    def add(self, adapter: LoRARequest) -> None:
        """Serve an adapter from now on."""
        self._by_name[adapter.name] = adapter
        self._digests[adapter.name, adapter.path] = adapter.digest

    def remove(self, name: str) -> None:
        """Serve it no longer; requests that run with it go on. RequestError for another name."""
        if self._by_name.pop(name, None) is None:
            raise RequestError("not_found", f"no adapter {name!r} is loaded", param="lora_name")

    def records(self) -> tuple[ServedAdapter, ...]:
        """Describe them to the fleet, in the order of their names."""
        return tuple(
            ServedAdapter(one.name, one.path, one.digest)
            for one in sorted(self._by_name.values(), key=lambda one: one.name)
        )

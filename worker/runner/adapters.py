"""The adapters of the running requests: which slot runs with which, and their weights.

Weights are loaded when a request first needs them and kept while there is room; requests name
adapters by folder and digest, so a folder that has changed since is noticed. It computes nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from engine.messages import LoRARequest
from engine.output import NewRequestData
from kvindex.foundation.errors import DependencyError, PrefixFleetError
from worker.model.adapter_folder import check_adapter_folder
from worker.model.config import ModelConfig
from worker.model.lora import NO_ADAPTERS, Adapter, AdapterRows, BatchAdapters, load_adapter
from worker.runner.request_state import Int64Array

_log = logging.getLogger("prefixfleet.worker.adapters")

MAX_KEPT = 16
"""Adapters kept beside those that running requests use; the ones used longest ago go first."""


class AdapterTable:
    """Adapters by slot of the request table, until the slot is taken again.

    A request whose adapter cannot be loaded counts as one without; `take_failures` names it.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._of_slot: dict[int, LoRARequest] = {}
        self._loaded: OrderedDict[LoRARequest, Adapter] = OrderedDict()
        self._failures: dict[str, str] = {}

    def set(self, slot: int, request: NewRequestData) -> None:
        """Note what the request that enters `slot` runs with, and load it unless it is here."""
        self._of_slot.pop(slot, None)
        lora = request.lora
        if lora is None:
            return
        if lora not in self._loaded:
            try:
                self._loaded[lora] = self._load(lora)
            except PrefixFleetError as error:
                self._failures[request.request_id] = f"adapter {lora.name}: {error}"
                return
        self._of_slot[slot] = lora
        self._loaded.move_to_end(lora)
        self._make_room()

    def take_failures(self) -> dict[str, str]:
        """Return why requests that came since the last call cannot run, by request id."""
        failures, self._failures = self._failures, {}
        return failures

    def of_batch(self, slots: Int64Array, num_scheduled: Int64Array) -> BatchAdapters:
        """Group the tokens of a batch by adapter; slots and token counts in batch order."""
        if not self._of_slot:
            return NO_ADAPTERS
        chosen = [self._of_slot.get(slot) for slot in slots.tolist()]
        row_of_token = np.repeat(np.arange(len(slots)), num_scheduled)
        groups = []
        for lora in dict.fromkeys(lora for lora in chosen if lora is not None):
            has_it = np.fromiter((one == lora for one in chosen), bool, len(chosen))
            rows = None
            if not has_it.all():
                rows = torch.from_numpy(np.flatnonzero(has_it[row_of_token])).to(self._device)
            groups.append(AdapterRows(self._loaded[lora], rows))
        return BatchAdapters(groups)

    def _load(self, lora: LoRARequest) -> Adapter:
        """Load an adapter; DependencyError or ConfigError when its folder cannot be used."""
        folder = check_adapter_folder(Path(lora.path), self._model)
        if lora.digest and folder.digest != lora.digest:
            raise DependencyError(
                f"{lora.path} has changed since it was loaded under that name; load it again"
            )
        _log.info("adapter loaded name=%s folder=%s rank=%d", lora.name, lora.path, folder.rank)
        return load_adapter(folder, self._model, dtype=self._dtype).on(self._device)

    def _make_room(self) -> None:
        used = set(self._of_slot.values())
        idle = [lora for lora in self._loaded if lora not in used]
        for lora in idle[: max(0, len(idle) - MAX_KEPT)]:
            del self._loaded[lora]

"""LoRA adapters in the forward pass: what they add to the fused projections of some rows.

Each adapter adds scale * B @ A to the weight of its targets (Hu et al. 2021); here that is two
thin products per projection, for the rows of that adapter alone, so rows without an adapter stay
bit for bit what they are. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from worker.model.adapter_folder import WEIGHTS_FILE, AdapterFolder, target_shapes
from worker.model.config import ModelConfig

Projection = Literal["qkv", "out", "gate_up", "down"]

_TARGETS: dict[Projection, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(slots=True, frozen=True)
class LowRank:
    """What an adapter adds to one fused projection.

    `down` [ranks, in] is the A of every target that it has, stacked; each of `ups` is columns of
    the output, ranks of `down`, and the scaled B [columns, rank].
    """

    down: torch.Tensor
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]


@dataclass(slots=True, frozen=True)
class Adapter:
    """The weights of one adapter; projections that it leaves alone are missing."""

    parts: dict[tuple[int, Projection], LowRank]

    def on(self, device: torch.device) -> Adapter:
        """Return the adapter with its weights on a device."""
        return Adapter(
            {
                place: LowRank(
                    part.down.to(device),
                    tuple((columns, ranks, up.to(device)) for columns, ranks, up in part.ups),
                )
                for place, part in self.parts.items()
            }
        )


@dataclass(slots=True, frozen=True)
class AdapterRows:
    """The rows of a flattened batch that run with one adapter; [rows] int64, None for all."""

    adapter: Adapter
    rows: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class BatchAdapters:
    """Every row of a batch that has an adapter, grouped by adapter."""

    groups: Sequence[AdapterRows]

    def add(
        self, layer: int, projection: Projection, x: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Add to `output` [rows, out] what the adapters make of `x` [rows, in]; return it."""
        for group in self.groups:
            part = group.adapter.parts.get((layer, projection))
            if part is not None:
                _add(part, group.rows, x, output)
        return output


NO_ADAPTERS = BatchAdapters(())


def _add(part: LowRank, rows: torch.Tensor | None, x: torch.Tensor, output: torch.Tensor) -> None:
    low = (x if rows is None else x[rows]) @ part.down.t()
    for columns, ranks, up in part.ups:
        added = low[:, ranks] @ up.t()
        if rows is None:
            output[:, columns] += added
        else:
            output[:, columns].index_add_(0, rows, added)


def load_adapter(folder: AdapterFolder, model: ModelConfig, *, dtype: torch.dtype) -> Adapter:
    """Load an adapter that was checked against the model; weights are scaled in float32."""
    from safetensors import safe_open

    parts: dict[tuple[int, Projection], LowRank] = {}
    widths = target_shapes(model)
    with safe_open(Path(folder.folder) / WEIGHTS_FILE, framework="pt") as source:
        for layer in range(model.num_layers):
            for projection, targets in _TARGETS.items():
                downs: list[torch.Tensor] = []
                ups: list[tuple[slice, slice, torch.Tensor]] = []
                column = 0
                for target in targets:
                    end = column + widths[target][0]
                    name = folder.tensors.get((layer, target, "A"))
                    if name is not None:
                        start = len(downs) * folder.rank
                        up = source.get_tensor(folder.tensors[layer, target, "B"]).float()
                        downs.append(source.get_tensor(name).to(dtype))
                        ranks = slice(start, start + folder.rank)
                        ups.append((slice(column, end), ranks, (up * folder.scale).to(dtype)))
                    column = end
                if downs:
                    parts[layer, projection] = LowRank(torch.cat(downs), tuple(ups))
    return Adapter(parts)

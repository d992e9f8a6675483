"""Where the layers of a model keep their KV: cache groups, and rows of one shared cache.

Layers that look back equally far form groups of equal size, so that a block holds as many layers
whichever group it belongs to (vLLM's hybrid layout). Torch-free arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.kv_groups.spec import FullAttention, KVGroupSpec, SlidingWindow

_PADDING = 1.5
"""A larger kind may be this many times the smallest and still set the size of the groups: some
rows stay empty, and the smaller kind is spared a group per few layers."""


class LayerPlace(NamedTuple):
    """Where one layer keeps its KV: block ids of `group`, row `row` of the cache."""

    group: int
    row: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The window of each cache group, the place of each layer, and the rows that a cache needs."""

    windows: tuple[int | None, ...]
    places: tuple[LayerPlace, ...]
    num_rows: int

    @property
    def groups(self) -> tuple[KVGroupSpec, ...]:
        """The cache groups as the engine knows them."""
        return tuple(
            FullAttention() if window is None else SlidingWindow(window=window)
            for window in self.windows
        )


def kv_layout(num_layers: int, windows: Sequence[int | None]) -> KVLayout:
    """Lay out `num_layers` layers; `windows` is empty when every layer sees everything.

    Groups come in the order of their first layer.
    """
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows or [None] * num_layers):
        kinds[window].append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= _PADDING * min(counts) else min(counts)
    group_windows: list[int | None] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            for row, layer in enumerate(layers[start : start + size]):
                places[layer] = LayerPlace(len(group_windows), row)
            group_windows.append(window)
    return KVLayout(
        windows=tuple(group_windows),
        places=tuple(places[layer] for layer in range(num_layers)),
        num_rows=size,
    )

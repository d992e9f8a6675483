"""Where the layers of a model keep their KV: cache groups, and rows of one shared cache.

Layers that read the same part of the past form groups of equal size, so that a block holds as many
layers whichever group it belongs to (vLLM's hybrid layout). Torch-free arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.kv_groups.spec import FullAttention, KVGroupSpec, LinearState, SlidingWindow
from kvindex.foundation.errors import ConfigError
from worker.model.config import ModelConfig, Reach

_PADDING = 1.5
"""A larger kind may be this many times the smallest and still set the size of the groups: some
rows stay empty, and the smaller kind is spared a group per few layers."""


class LayerPlace(NamedTuple):
    """Where one layer keeps its KV: block ids of `group`, row `row` of the cache."""

    group: int
    row: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What each cache group reads, the place of each layer, and the rows that a cache needs.

    `windows` has None for a group that reads everything, and for one in `states`.
    """

    windows: tuple[int | None, ...]
    states: frozenset[int] = frozenset()
    places: tuple[LayerPlace, ...]
    num_rows: int

    @property
    def groups(self) -> tuple[KVGroupSpec, ...]:
        """The cache groups as the engine knows them."""
        return tuple(
            LinearState()
            if group in self.states
            else FullAttention()
            if window is None
            else SlidingWindow(window=window)
            for group, window in enumerate(self.windows)
        )


def kv_layout(num_layers: int, windows: Sequence[Reach]) -> KVLayout:
    """Lay out `num_layers` layers; `windows` is empty when every layer reads everything.

    Groups come in the order of their first layer.
    """
    kinds: dict[Reach, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows or [None] * num_layers):
        kinds[window].append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= _PADDING * min(counts) else min(counts)
    group_windows: list[int | None] = []
    states: list[int] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            for row, layer in enumerate(layers[start : start + size]):
                places[layer] = LayerPlace(len(group_windows), row)
            if window == "state":
                states.append(len(group_windows))
            group_windows.append(None if window == "state" else window)
    return KVLayout(
        windows=tuple(group_windows),
        states=frozenset(states),
        places=tuple(places[layer] for layer in range(num_layers)),
        num_rows=size,
    )


def check_state_size(config: ModelConfig, *, num_channels: int, block_size: int) -> None:
    """Raise ConfigError when a state of `num_channels` does not fit where a block keeps keys."""
    if config.conv_kernel is None:
        return
    per_token = config.num_kv_heads * config.head_dim
    needed = -(-(config.conv_kernel - 1) * num_channels // per_token)
    if block_size < needed:
        raise ConfigError(
            f"engine.block_size {block_size} has no room for a state of {config.architecture}; "
            f"set it to {needed} or more"
        )

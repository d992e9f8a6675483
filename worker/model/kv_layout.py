"""Where the layers of a model keep their KV: cache groups, and rows of one shared cache.

Layers that read the same part of the past form groups of equal size, so that a block holds as many
layers whichever group it belongs to (vLLM's hybrid layout). Where a state is larger than the keys
and values of the engine's block, blocks of attention hold more tokens. Torch-free arithmetic.
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
    `attention_block_size`: tokens whose keys a block holds, None where that is the engine's own.
    """

    windows: tuple[int | None, ...]
    states: frozenset[int] = frozenset()
    places: tuple[LayerPlace, ...]
    num_rows: int
    attention_block_size: int | None = None

    @property
    def groups(self) -> tuple[KVGroupSpec, ...]:
        """The cache groups as the engine knows them."""
        return tuple(
            LinearState()
            if group in self.states
            else FullAttention(block_size=self.attention_block_size)
            if window is None
            else SlidingWindow(window=window, block_size=self.attention_block_size)
            for group, window in enumerate(self.windows)
        )


def kv_layout(
    num_layers: int, windows: Sequence[Reach], *, attention_block_size: int | None = None
) -> KVLayout:
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
        attention_block_size=attention_block_size,
    )


def attention_block_size(config: ModelConfig, *, block_size: int, itemsize: int) -> int | None:
    """Return how many tokens a block keeps keys for, None for `block_size`, the engine's own.

    All blocks are equally large, so it is as many as make room for a Mamba state, in whole blocks
    of the engine. States are still kept, and prefixes hit, every `block_size` tokens.
    """
    if config.mamba is None:
        return None
    bytes_per_token = 2 * config.num_kv_heads * config.head_dim * itemsize
    needed = -(-config.mamba.state_bytes(itemsize) // bytes_per_token)
    return -(-needed // block_size) * block_size


def cache_layout(config: ModelConfig, *, block_size: int, itemsize: int) -> KVLayout:
    """Lay out the layers of a model for an engine's block size and a precision's bytes."""
    return kv_layout(
        config.num_layers,
        config.windows,
        attention_block_size=attention_block_size(config, block_size=block_size, itemsize=itemsize),
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

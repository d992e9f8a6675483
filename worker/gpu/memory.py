"""How much of a GPU's memory is left for the KV cache: arithmetic over measured bytes.

The measuring is worker.gpu.profiling's; this allocates nothing and knows no device.
"""

from __future__ import annotations

import math

import msgspec

from kvindex.foundation.errors import ConfigError


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model takes besides its KV cache, in bytes.

    `non_torch`: driver, libraries and compiled kernels. `activations`: the peak of the largest
    step over what stays allocated. `first_graph` includes what graphs share, `next_graph` is what
    each further one adds.
    """

    weights: int
    non_torch: int
    activations: int
    first_graph: int = 0
    next_graph: int = 0

    def graphs(self, count: int) -> int:
        """Estimate the bytes of `count` graphs."""
        return self.first_graph + (count - 1) * self.next_graph if count else 0


def requested_bytes(total: int, utilization: float) -> int:
    """Return what this process may take of the device."""
    return math.ceil(total * utilization)


def check_free(*, total: int, free: int, utilization: float) -> None:
    """Raise ConfigError when others hold so much of the device that the share is not free."""
    requested = requested_bytes(total, utilization)
    if requested > free:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} asks for {_gib(requested)} of the GPU, and "
            f"{_gib(free)} of {_gib(total)} are free; set it to {free / total * 0.99:.2f} or less, "
            "or end what else runs there"
        )


def kv_cache_bytes(
    profile: MemoryProfile, *, total: int, utilization: float, num_graphs: int
) -> int:
    """Return what is left for the KV cache; ConfigError, with the parts, when nothing is."""
    graphs = profile.graphs(num_graphs)
    taken = profile.weights + profile.non_torch + profile.activations + graphs
    available = requested_bytes(total, utilization) - taken
    if available <= 0:
        raise ConfigError(
            f"nothing is left for the KV cache: of {_gib(total)} x gpu_memory_utilization "
            f"{utilization:g}, weights take {_gib(profile.weights)}, activations "
            f"{_gib(profile.activations)}, CUDA graphs {_gib(graphs)} and the rest "
            f"{_gib(profile.non_torch)}; raise gpu_memory_utilization, or lower "
            "max_num_batched_tokens"
        )
    return available


def is_outdated(kept: MemoryProfile, measured: MemoryProfile, *, tolerance: float = 0.02) -> bool:
    """Tell whether a kept profile allows for less than was measured now, beyond a tolerance.

    Taking less than it says costs a little capacity; taking more ends in a shortage.
    """
    allowed = kept.weights + kept.non_torch + kept.activations
    needed = measured.weights + measured.non_torch + measured.activations
    return needed > allowed * (1 + tolerance)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"

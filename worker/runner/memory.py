"""How many KV blocks fit, and how long a sequence they can hold.

Pure arithmetic over numbers that worker.cpu.machine measures; it allocates nothing.
"""

from __future__ import annotations

import logging

import msgspec

from kvindex.foundation.errors import ConfigError

logger = logging.getLogger("prefixfleet.worker.memory")

MAX_DEFAULT_KV_BYTES = 1 << 30
DEFAULT_KV_SHARE = 0.1


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the paged cache; `num_blocks` includes the null block 0."""

    num_blocks: int
    max_model_len: int


def default_kv_bytes(available_bytes: int) -> int:
    """Return the share of a CPU machine's free memory that the cache takes unasked."""
    return min(MAX_DEFAULT_KV_BYTES, int(available_bytes * DEFAULT_KV_SHARE))


def check_host_tier(*, num_host_blocks: int, bytes_per_block: int, available_bytes: int) -> None:
    """Raise ConfigError when a host tier of so many blocks does not fit the machine."""
    wanted = num_host_blocks * bytes_per_block
    if wanted > available_bytes:
        raise ConfigError(
            f"engine.num_host_blocks {num_host_blocks} takes {wanted} bytes of host memory, and "
            f"{available_bytes} are available; set it to {available_bytes // bytes_per_block} or "
            "less"
        )


def plan_kv_cache(
    *,
    kv_bytes: int,
    bytes_per_block: int,
    block_size: int,
    num_blocks: int | None,
    model_limit: int,
    configured_limit: int,
) -> KVCachePlan:
    """Fit the cache; `num_blocks` overrides `kv_bytes`, `configured_limit` 0 means none.

    A longest sequence must fit the blocks alone, so a small cache shortens `max_model_len`; that
    is logged. Raises ConfigError when not even one block fits.
    """
    blocks = kv_bytes // bytes_per_block if num_blocks is None else num_blocks
    if blocks < 2:
        raise ConfigError(
            f"the KV cache holds {blocks} blocks of {bytes_per_block} bytes, and needs at least 2; "
            f"set worker.kv_cache_memory_bytes to {2 * bytes_per_block} or more"
        )
    wanted = min(model_limit, configured_limit) if configured_limit else model_limit
    max_model_len = min(wanted, (blocks - 1) * block_size)
    requested = configured_limit or model_limit
    if max_model_len < requested:
        reason = "model" if max_model_len == model_limit else "kv_cache"
        logger.warning(
            "max_model_len reduced from=%d to=%d limited_by=%s num_blocks=%d",
            requested,
            max_model_len,
            reason,
            blocks,
        )
    return KVCachePlan(num_blocks=blocks, max_model_len=max_model_len)

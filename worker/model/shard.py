"""Which part of a model each of several ranks holds; torch-free.

Attention is split by KV heads, a short convolution by channels, the feed-forward by its inner
columns, the head by tokens of the vocabulary; each rank has the whole embedding, and the KV of its
own heads (Shoeybi et al. 2019).
"""

from __future__ import annotations

import msgspec

from kvindex.foundation.errors import ConfigError
from worker.model.config import ModelConfig


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of every layer: ranges of heads, channels, inner columns and tokens.

    `vocab_rows` rows of the head are computed by each rank; those beyond `vocab` are padding.
    """

    heads: range
    kv_heads: range
    channels: range
    inner: range
    vocab: range
    vocab_rows: int


def check_parallel_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError, naming the sizes that work, when `size` ranks cannot share the model."""
    if size > 1 and not config.is_native:
        raise ConfigError(
            f"tensor_parallel_size {size}: {config.architecture} is computed by transformers, "
            "which runs on one rank only"
        )
    has_shared = config.experts is not None and config.experts.has_shared
    if size > 1 and (config.mamba is not None or has_shared):
        raise ConfigError(
            f"tensor_parallel_size {size}: {config.architecture} with Mamba layers or experts "
            "runs on one rank only; set it to 1"
        )
    works = [n for n in range(1, config.num_heads + 1) if _fits(config, n)]
    if size not in works:
        raise ConfigError(
            f"tensor_parallel_size {size} does not fit {config.num_heads} heads that share "
            f"{config.num_kv_heads} KV heads; these sizes do: {', '.join(map(str, works))}"
        )


def shard_of(config: ModelConfig, *, rank: int, size: int) -> Shard:
    """Return what `rank` of `size` holds; `size` must have been checked.

    KV heads are dealt out as evenly as they go. Where there are fewer than ranks, each is held by
    several, which share out the query heads that read it.
    """
    per_kv_head = config.num_heads // config.num_kv_heads
    kv_heads = _part(config.num_kv_heads, rank, size)
    heads = range(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head)
    if config.num_kv_heads < size:
        first = rank * config.num_kv_heads // size
        heads = _part(config.num_heads, rank, size)
        kv_heads = range(first, first + 1)
    vocab_rows = -(-config.vocab_size // size)
    first_token = min(rank * vocab_rows, config.vocab_size)
    return Shard(
        heads=heads,
        kv_heads=kv_heads,
        channels=_part(config.hidden_size, rank, size),
        inner=_part(config.inner_size, rank, size),
        vocab=range(first_token, min(first_token + vocab_rows, config.vocab_size)),
        vocab_rows=vocab_rows,
    )


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of what a rank holds: its own heads, the whole vocabulary."""
    return msgspec.structs.replace(
        config, num_heads=len(shard.heads), num_kv_heads=len(shard.kv_heads)
    )


def _part(count: int, rank: int, size: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)


def _fits(config: ModelConfig, size: int) -> bool:
    """Every rank needs a KV head; one that is shared must be shared by equal numbers of ranks."""
    if size <= config.num_kv_heads:
        return True
    return size % config.num_kv_heads == 0 and config.num_heads % size == 0

"""What each rank of a model holds: everything once, but for KV heads that are fewer than ranks."""

from __future__ import annotations

import msgspec
import pytest

from kvindex.foundation.errors import ConfigError
from worker.model.config import ModelConfig
from worker.model.rope_config import RopeConfig
from worker.model.shard import Shard, check_parallel_size, local_config, shard_of

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position=8192,
    rope=RopeConfig(theta=1e5),
    tie_word_embeddings=True,
    qkv_bias=False,
)


def shaped(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return msgspec.structs.replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads)


def shards(config: ModelConfig, size: int) -> list[Shard]:
    check_parallel_size(config, size)
    return [shard_of(config, rank=rank, size=size) for rank in range(size)]


def test_three_ranks_share_three_kv_heads_equally() -> None:
    assert [(s.heads, s.kv_heads) for s in shards(CONFIG, 3)] == [
        (range(0, 3), range(0, 1)),
        (range(3, 6), range(1, 2)),
        (range(6, 9), range(2, 3)),
    ]


def test_two_ranks_share_three_kv_heads_as_evenly_as_they_go() -> None:
    first, second = shards(CONFIG, 2)
    assert (first.heads, first.kv_heads) == (range(0, 3), range(0, 1))
    assert (second.heads, second.kv_heads) == (range(3, 9), range(1, 3))
    assert local_config(CONFIG, second).num_heads == 6
    assert local_config(CONFIG, second).num_kv_heads == 2


def test_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    assert [(s.heads, s.kv_heads) for s in shards(shaped(8, 2), 4)] == [
        (range(0, 2), range(0, 1)),
        (range(2, 4), range(0, 1)),
        (range(4, 6), range(1, 2)),
        (range(6, 8), range(1, 2)),
    ]


def test_inner_columns_and_tokens_are_each_held_once() -> None:
    parts = shards(msgspec.structs.replace(CONFIG, vocab_size=10, intermediate_size=11), 3)
    assert [s.inner for s in parts] == [range(0, 3), range(3, 7), range(7, 11)]
    assert [s.vocab for s in parts] == [range(0, 4), range(4, 8), range(8, 10)]
    assert {s.vocab_rows for s in parts} == {4}


@pytest.mark.parametrize(
    ("config", "size", "works"),
    [(CONFIG, 4, "1, 2, 3, 9"), (shaped(8, 2), 3, "1, 2, 4, 8"), (shaped(4, 4), 8, "1, 2, 3, 4")],
)
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(
    config: ModelConfig, size: int, works: str
) -> None:
    with pytest.raises(ConfigError, match=f"size {size} does not fit .* these sizes do: {works}$"):
        check_parallel_size(config, size)

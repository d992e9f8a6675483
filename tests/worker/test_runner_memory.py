"""How large the KV cache becomes, and what that does to the context length."""

from __future__ import annotations

import logging

import pytest

from kvindex.foundation.errors import ConfigError
from worker.runner.memory import KVCachePlan, default_kv_bytes, plan_kv_cache


def plan(
    *, kv_bytes: int = 0, num_blocks: int | None = None, configured_limit: int = 0
) -> KVCachePlan:
    return plan_kv_cache(
        kv_bytes=kv_bytes,
        bytes_per_block=100,
        block_size=16,
        num_blocks=num_blocks,
        model_limit=2048,
        configured_limit=configured_limit,
    )


def test_a_tenth_of_the_free_memory_is_taken_and_at_most_one_gibibyte() -> None:
    assert default_kv_bytes(5_000_000_000) == 500_000_000
    assert default_kv_bytes(64 << 30) == 1 << 30


def test_blocks_are_what_fits_whole() -> None:
    assert plan(kv_bytes=20_099).num_blocks == 200


def test_an_explicit_number_of_blocks_wins_over_bytes() -> None:
    assert plan(kv_bytes=20_000, num_blocks=300).num_blocks == 300


@pytest.mark.parametrize(
    ("num_blocks", "configured", "expected"),
    [(1000, 0, 2048), (1000, 512, 512), (1000, 4096, 2048), (33, 0, 512), (33, 256, 256)],
)
def test_the_context_is_limited_by_model_setting_and_blocks(
    num_blocks: int, configured: int, expected: int
) -> None:
    assert plan(num_blocks=num_blocks, configured_limit=configured).max_model_len == expected


def test_a_reduced_context_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan(num_blocks=33)
        plan(num_blocks=1000, configured_limit=4096)
        plan(num_blocks=1000, configured_limit=512)
    assert caplog.messages == [
        "max_model_len reduced from=2048 to=512 limited_by=kv_cache num_blocks=33",
        "max_model_len reduced from=4096 to=2048 limited_by=model num_blocks=1000",
    ]


def test_a_cache_without_room_for_a_block_is_refused_with_the_bytes_it_needs() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes to 200 or more"):
        plan(kv_bytes=199)

"""What is left for the KV cache, and what is kept of it from one start to the next."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvindex.foundation.errors import ConfigError
from worker.gpu.memory import (
    MemoryProfile,
    check_free,
    is_outdated,
    kv_cache_bytes,
    requested_bytes,
)
from worker.gpu.profile_store import ProfileKey, ProfileStore

GIB = 1 << 30
PROFILE = MemoryProfile(
    weights=14 * GIB, non_torch=GIB, activations=2 * GIB, first_graph=300, next_graph=20
)
KEY = ProfileKey(
    model_digest="a",
    device_name="b",
    total_bytes=80 * GIB,
    dtype="bfloat16",
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    max_model_len=4096,
    graph_mode="full",
    software="torch 2",
)


def test_the_share_of_the_device_is_rounded_up() -> None:
    assert requested_bytes(1001, 0.92) == 921


def test_what_is_left_is_the_share_less_all_that_was_measured() -> None:
    left = kv_cache_bytes(PROFILE, total=80 * GIB, utilization=0.5, num_graphs=11)
    assert left == 40 * GIB - 17 * GIB - 500


def test_no_graphs_cost_nothing_and_one_costs_what_all_share() -> None:
    assert [PROFILE.graphs(count) for count in (0, 1, 2)] == [0, 300, 320]


def test_a_model_that_leaves_nothing_is_refused_with_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"weights take 14\.00 GiB.*raise gpu_memory_util"):
        kv_cache_bytes(PROFILE, total=16 * GIB, utilization=0.92, num_graphs=0)


def test_memory_that_others_hold_is_named_with_a_share_that_would_work() -> None:
    check_free(total=80 * GIB, free=74 * GIB, utilization=0.92)
    with pytest.raises(ConfigError, match=r"asks for 73\.60 GiB.*set it to 0\.49 or less"):
        check_free(total=80 * GIB, free=40 * GIB, utilization=0.92)


def test_only_a_need_beyond_the_tolerance_outdates_a_profile() -> None:
    def grown(num_bytes: int) -> MemoryProfile:
        return msgspec.structs.replace(PROFILE, activations=PROFILE.activations + num_bytes)

    assert not is_outdated(PROFILE, grown(-GIB))
    assert not is_outdated(PROFILE, grown(GIB // 4))
    assert is_outdated(PROFILE, grown(GIB // 2))


def test_a_profile_is_kept_by_all_that_it_depends_on(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new")
    assert store.get(KEY) is None
    store.put(KEY, PROFILE)
    assert ProfileStore(tmp_path / "new").get(KEY) == PROFILE
    assert store.get(msgspec.structs.replace(KEY, dtype="float16")) is None
    store.forget(KEY)
    store.forget(KEY)
    assert store.get(KEY) is None


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.put(KEY, PROFILE)
    (tmp_path / KEY.file_name).write_text("{")
    assert store.get(KEY) is None


def test_without_a_folder_nothing_is_kept() -> None:
    store = ProfileStore(None)
    store.put(KEY, PROFILE)
    store.forget(KEY)
    assert store.get(KEY) is None

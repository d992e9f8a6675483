"""The KV cache gets what measuring leaves; what was measured is trusted, then checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from kvindex.foundation.errors import ConfigError
from tests.worker.gpu.gpu_fixtures import FakeDevice
from tests.worker.model_fixtures import write_tiny_model
from worker.core.spec import CoreSpec, TensorParallelRank
from worker.executors.build import build_local_executor
from worker.gpu.config import GpuConfig
from worker.gpu.device import find_gpu
from worker.gpu.load import GpuLoader
from worker.model.config import ModelConfig, read_model_config

ENGINE = EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=32)
BYTES_PER_BLOCK = 2 * 2 * 4 * 2 * 16 * 4  # keys and values, layers, tokens, heads, size, float32
# Of 92 MB that may be used, others have 2, activations take 5, and two graphs 3 and 1.
NUM_BLOCKS = 81_000_000 // BYTES_PER_BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def loader(
    folder: Path,
    device: FakeDevice,
    *,
    profiles: Path | None = None,
    config: ModelConfig | None = None,
) -> GpuLoader:
    profile_dir = None if profiles is None else str(profiles)
    return GpuLoader(
        folder,
        config or read_model_config(folder),
        torch.float32,
        ENGINE,
        GpuConfig(graph_mode="full_decode_only", profile_dir=profile_dir),
        device,
    )


def test_the_first_start_measures_and_the_second_one_trusts_that(
    folder: Path, tmp_path: Path
) -> None:
    first = FakeDevice()
    assert loader(folder, first, profiles=tmp_path).load().plan.num_blocks == NUM_BLOCKS
    assert first.num_resets > 1
    second = FakeDevice()
    loaded = loader(folder, second, profiles=tmp_path).load()
    assert loaded.plan.num_blocks == NUM_BLOCKS
    assert second.num_resets == 0
    assert not loaded.background.is_done
    loaded.background.when_idle()
    assert second.num_resets == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_kept_profile_that_no_longer_holds_is_dropped_in_the_background(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader(folder, FakeDevice(), profiles=tmp_path).load()
    device = FakeDevice(activations=6_000_000)
    loaded = loader(folder, device, profiles=tmp_path).load()
    assert loaded.plan.num_blocks == NUM_BLOCKS
    loaded.background.when_idle()
    assert list(tmp_path.iterdir()) == []
    assert "outdated" in caplog.text


def test_a_given_size_needs_no_measuring(folder: Path) -> None:
    device = FakeDevice(used_by_others=90_000_000)
    assert loader(folder, device).load(num_blocks=10).plan.num_blocks == 10
    by_bytes = loader(folder, device).load(kv_cache_memory_bytes=20 * BYTES_PER_BLOCK)
    assert by_bytes.plan.num_blocks == 20
    assert device.num_resets == 0


def test_a_device_that_others_fill_is_refused_before_anything_is_loaded(folder: Path) -> None:
    device = FakeDevice(used_by_others=50_000_000)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.92"):
        loader(folder, device).load()


@pytest.mark.parametrize(
    "fields", [{"windows": (8, None)}, {"residual_scale": 0.5}, {"query_scale": 4.0}]
)
def test_a_model_that_only_the_cpu_computes_is_refused_by_name(
    folder: Path, fields: dict[str, object]
) -> None:
    config = msgspec.structs.replace(read_model_config(folder), **fields)
    with pytest.raises(ConfigError, match=r"set worker\.device to cpu"):
        loader(folder, FakeDevice(), config=config).load(num_blocks=10)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert find_gpu(GpuConfig()) is None
    assert find_gpu(GpuConfig(device="cpu")) is None
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        find_gpu(GpuConfig(device="cuda"))


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        GpuConfig(memory_utilization=share)


@pytest.mark.parametrize(
    "settings",
    [
        {"deterministic": True},
        {"tensor_parallel_rank": TensorParallelRank(0, 2, "/rendezvous")},
    ],
)
def test_what_runs_on_a_cpu_alone_is_refused_for_a_gpu(settings: dict[str, Any]) -> None:
    spec = CoreSpec(
        replica_id="r",
        engine=ENGINE,
        model_folder="/model",
        gpu=GpuConfig(device="cuda"),
        **settings,
    )
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))[:13]}.*worker\.device to cpu"):
        build_local_executor(spec)

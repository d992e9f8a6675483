"""The GPU executor under a real engine core: the same tokens as the CPU's, in graphs or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig, SpeculationConfig
from engine.executor import execute
from engine.frontend.sampling_params import SamplingParams
from engine.messages import LoRARequest
from kvindex.foundation.errors import DependencyError
from tests.worker.adapter_fixtures import write_adapter
from tests.worker.gpu.gpu_fixtures import FakeDevice
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    new_request,
    random_prompts,
    step_of,
    write_tiny_model,
)
from worker.gpu.config import GpuConfig
from worker.gpu.device import MemoryUse
from worker.gpu.executor import GpuExecutor

PROMPTS = random_prompts(3, lengths=[2, 5, 7], vocab_size=VOCAB_SIZE)
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, top_p=0.8, max_tokens=2, ignore_eos=True),
]
ENGINE = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture(scope="module")
def executor(folder: Path, device: FakeDevice) -> Iterator[GpuExecutor]:
    executor = GpuExecutor(
        folder,
        dtype="float32",
        engine_config=ENGINE,
        gpu=GpuConfig(graph_mode="full_decode_only"),
        device=device,
        num_blocks=40,
    )
    yield executor
    executor.close()


def test_tokens_are_those_of_the_cpu_in_graphs_and_before_they_exist(
    executor: GpuExecutor, device: FakeDevice, folder: Path
) -> None:
    expected = EngineRun(executor_for(folder), ENGINE).generate(PROMPTS, SAMPLING)
    assert EngineRun(executor, ENGINE).generate(PROMPTS, SAMPLING) == expected
    executor.wait_for_graphs()
    captured = device.graphs.num_replays
    assert EngineRun(executor, ENGINE).generate(PROMPTS, SAMPLING) == expected
    assert device.graphs.num_replays > captured


@pytest.mark.slow
def test_tokens_with_drafts_are_those_without(folder: Path) -> None:
    config = msgspec.structs.replace(
        ENGINE,
        max_num_seqs=2,
        speculation=SpeculationConfig(
            method="ngram", num_draft_tokens=2, min_ngram=1, adaptive=False
        ),
    )
    device = FakeDevice()
    executor = GpuExecutor(
        folder,
        dtype="float32",
        engine_config=config,
        gpu=GpuConfig(graph_mode="full_decode_only"),
        device=device,
        num_blocks=40,
    )
    executor.wait_for_graphs()
    prompts = [[5, 6, 7] * 3, [9, 9, 9, 9]]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    plain = msgspec.structs.replace(config, speculation=SpeculationConfig())
    expected = EngineRun(executor_for(folder), plain).generate(prompts, greedy)
    assert EngineRun(executor, config).generate(prompts, greedy) == expected
    executor.close()


def test_padding_is_reported_with_the_step(executor: GpuExecutor, device: FakeDevice) -> None:
    executor.wait_for_graphs()
    prompts = [[3], [4], [5]]
    new = [new_request(str(i), prompt, [i + 1]) for i, prompt in enumerate(prompts)]
    output = execute(executor, step_of(new=new, scheduled={"0": 1, "1": 1, "2": 1}))
    assert output.num_padding_tokens == 1
    assert execute(executor, step_of(dropped=["0", "1", "2"])).num_padding_tokens == 0


@pytest.mark.slow
def test_an_adapter_runs_beside_rows_without_one_and_without_graphs(
    executor: GpuExecutor, device: FakeDevice, folder: Path, tmp_path: Path
) -> None:
    executor.wait_for_graphs()
    replays = device.graphs.num_replays
    adapter = LoRARequest("a", str(write_adapter(tmp_path / "a", folder, seed=1)))
    plain = new_request("plain", [7, 8, 9], [1])
    adapted = msgspec.structs.replace(new_request("adapted", [7, 8, 9], [2]), lora=adapter)
    step = step_of(new=[plain, adapted], scheduled={"plain": 3, "adapted": 3})
    expected = execute(executor_for(folder), step).sampled_token_ids
    assert execute(executor, step).sampled_token_ids == expected
    assert expected["plain"] != expected["adapted"]
    assert device.graphs.num_replays == replays
    execute(executor, step_of(dropped=["plain", "adapted"]))


def test_a_folder_that_cannot_be_loaded_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(DependencyError):
        GpuExecutor(
            write_tiny_model(tmp_path / "model"),
            dtype="float32",
            engine_config=ENGINE,
            gpu=GpuConfig(),
            device=BrokenDevice(),
        )
    assert threading.active_count() == before


class BrokenDevice(FakeDevice):
    """A device that fails as soon as it is asked."""

    def memory(self) -> MemoryUse:
        raise DependencyError("the device is gone")

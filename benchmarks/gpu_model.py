"""A whole model on the GPU: beside transformers, in graphs and without, and how fast it is.

Part of gpu_check. Engines run through the same core as in a replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.timing import Row, at_least, at_most
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineRequest
from kvindex.foundation.clock import SystemClock
from worker.cpu.attention import AttentionPlan
from worker.gpu.config import GpuConfig
from worker.gpu.device import GpuDevice
from worker.gpu.executor import GpuExecutor
from worker.gpu.graphs import Graph, GraphBackend
from worker.gpu.load import GpuLoader
from worker.model.config import read_model_config

_MAX_ERROR = 1e-3
_MIN_AGREEMENT = 0.995
_GAP = 0.125
"""Logits of two bfloat16 computations may lie so far apart that closer rivals swap places."""


class Decoded(NamedTuple):
    """Tokens of each request, and seconds and tokens of the steps in which all were decoding."""

    token_ids: list[list[int]]
    decode_s: float
    num_decoded: int


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts."""
    numbers = np.random.default_rng(4).integers(3, vocab_size, (count, length))
    return [[int(token) for token in row] for row in numbers]


def decode(
    executor: GpuExecutor,
    config: EngineConfig,
    requests: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
) -> Decoded:
    """Run requests together to their ends."""
    core = EngineCore(config, executor, SystemClock())
    ids = [f"{time.monotonic_ns()}-{i}" for i in range(len(requests))]
    for request_id, prompt, parameters in zip(ids, requests, sampling, strict=True):
        core.add(
            EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=parameters)
        )
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    decode_s, num_decoded = 0.0, 0
    while core.has_work:
        started = time.perf_counter()
        outputs = core.step()
        took = time.perf_counter() - started
        for output in outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
        if len(outputs) == len(ids) and min(map(len, tokens.values())) > 2:
            decode_s += took
            num_decoded += len(outputs)
    core.step()
    return Decoded([tokens[request_id] for request_id in ids], decode_s, num_decoded)


class _Again:
    """Does the captured work again instead of replaying it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class _WithoutGraphs:
    """A device whose graphs are none."""

    def __init__(self, device: GpuDevice) -> None:
        self.name = device.name
        self.total_bytes = device.total_bytes
        self.num_processors = device.num_processors
        self.torch_device = device.torch_device
        self.memory = device.memory
        self.reset_peak = device.reset_peak

    def graph_backend(self) -> GraphBackend:
        """Return what captures nothing."""
        return self

    def capture(self, work: Callable[[], None]) -> Graph:
        """Keep the work itself."""
        return _Again(work)


class ModelCheck:
    """One model folder on one device."""

    def __init__(self, folder: Path, device: GpuDevice, *, name: str) -> None:
        self._folder = folder
        self._device = device
        self._name = name
        self._config = read_model_config(folder)

    def logits(self, dtype: torch.dtype, *, num_tokens: int = 200) -> Iterator[Row]:
        """Compare the logits of a prompt, in one chunk, with transformers'."""
        import transformers

        prompt = prompts(1, num_tokens, self._config.vocab_size)[0]
        reference: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=dtype
        )
        reference = reference.to(self._device.torch_device).eval()
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=self._device.torch_device)
            expected = reference(ids).logits[0].float()
            ours = self._prefill(prompt, dtype)
        label = f"{self._name}, {str(dtype).removeprefix('torch.')}"
        if dtype == torch.float32:
            error = float((ours - expected).abs().max())
            yield at_most(f"{label}: largest error of a logit", error, "", _MAX_ERROR)
        chosen = expected.gather(1, ours.argmax(-1, keepdim=True)).squeeze(1)
        gap = 0.0 if dtype == torch.float32 else _GAP
        agreeing = (expected.amax(-1) - chosen <= gap).float().mean()
        yield at_least(f"{label}: positions that agree", float(agreeing), "", _MIN_AGREEMENT)

    def _prefill(self, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
        engine = EngineConfig(max_model_len=256, max_num_batched_tokens=256, max_num_seqs=2)
        gpu = GpuConfig(enforce_eager=True)
        loader = GpuLoader(self._folder, self._config, dtype, engine, gpu, self._device)
        loaded = loader.load(num_blocks=32)
        count = len(prompt)
        return loaded.model.forward(
            torch.tensor(prompt),
            torch.arange(count),
            cache=loaded.memory.cache,
            plan=AttentionPlan(
                num_queries=np.array([count]),
                num_computed=np.array([0]),
                block_tables=np.arange(1, 17, dtype=np.int32)[None],
                block_size=engine.block_size,
            ),
            rows=torch.arange(count),
        )

    def graphs(self, dtype: str, *, num_requests: int = 24, num_tokens: int = 40) -> Iterator[Row]:
        """Compare greedy and seeded tokens of some requests in graphs and without.

        Both are padded alike: matrix products of other sizes may round in other ways.
        """
        config = EngineConfig(
            max_model_len=512,
            max_num_batched_tokens=256,
            max_num_seqs=num_requests,
            max_step_s=0,
        )
        requests = [
            each[: 5 + 13 * i % 180]
            for i, each in enumerate(prompts(num_requests, 200, self._config.vocab_size))
        ]
        sampling = [
            SamplingParams(
                temperature=0.8 * (i % 2), seed=i, max_tokens=num_tokens, ignore_eos=True
            )
            for i in range(len(requests))
        ]
        found = []
        for device in (self._device, _WithoutGraphs(self._device)):
            executor = GpuExecutor(
                self._folder,
                dtype=dtype,
                engine_config=config,
                gpu=GpuConfig(),
                device=device,
                num_blocks=1024,
            )
            executor.wait_for_graphs()
            found.append(decode(executor, config, requests, sampling).token_ids)
            executor.close()
        differing = sum(a != b for a, b in zip(*found, strict=True))
        name = f"{self._name}, {dtype}: requests whose tokens differ in graphs"
        yield at_most(name, float(differing), "", 0.0)

    def throughput(
        self, batches: Sequence[int], *, bandwidth: float, num_tokens: int
    ) -> Iterator[Row]:
        """Measure decode steps of 512-token prompts, as a share of the memory's `bandwidth`.

        Bytes of a step: every weight once, and the keys and values of every context.
        """
        config = EngineConfig(
            max_model_len=2048,
            max_num_batched_tokens=8192,
            max_num_seqs=max(batches),
            max_step_s=0,
            async_depth=1,
        )
        executor = GpuExecutor(
            self._folder,
            dtype="bfloat16",
            engine_config=config,
            gpu=GpuConfig(),
            device=self._device,
        )
        executor.wait_for_graphs()
        shape = self._config
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2
        weights = executor.weight_bytes
        for batch in batches:
            sampling = [
                SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
            ] * batch
            done = decode(executor, config, prompts(batch, 512, shape.vocab_size), sampling)
            step_s = done.decode_s / (done.num_decoded / batch)
            read = weights + batch * (512 + num_tokens / 2) * per_token
            label = f"{self._name}, bfloat16, batch {batch}"
            rate = done.num_decoded / done.decode_s
            yield Row(name=f"{label}: decode", ours=rate, unit="tok/s")
            yield Row(
                name=f"{label}: share of memory bandwidth", ours=read / step_s / bandwidth, unit=""
            )
        executor.close()

    def readiness(self, profile_dir: Path) -> Iterator[Row]:
        """Measure two starts: the first measures memory, the second trusts that."""
        for start in ("first", "second"):
            started = time.perf_counter()
            executor = GpuExecutor(
                self._folder,
                dtype="bfloat16",
                engine_config=EngineConfig(max_num_batched_tokens=8192, max_num_seqs=256),
                gpu=GpuConfig(profile_dir=str(profile_dir)),
                device=self._device,
            )
            ready_s = time.perf_counter() - started
            executor.wait_for_graphs()
            graphs_s = time.perf_counter() - started
            executor.close()
            yield Row(name=f"{self._name}, {start} start: ready", ours=ready_s, unit="s")
            yield Row(name=f"{self._name}, {start} start: graphs captured", ours=graphs_s, unit="s")

"""The executor that runs a model in this process, on one GPU.

Steps run on a thread of their own, where captures and checks fill the pauses. What to compute is
decided by the scheduler.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.executor import ExecutorInfo
from engine.output import ModelRunnerOutput, SchedulerOutput
from worker.executors.uniproc import execution_digest
from worker.gpu.config import GpuConfig
from worker.gpu.device import GpuDevice
from worker.gpu.load import GpuLoader, LoadedGpuModel
from worker.gpu.model_thread import ModelThread
from worker.gpu.sampler import sample_on_device
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend
from worker.model.config import read_model_config
from worker.model.dtypes import dtype_name, resolve_dtype
from worker.runner.model_runner import ModelRunner
from worker.spec_decode.build import build_speculation

_log = logging.getLogger("prefixfleet.worker.executor")


class GpuExecutor:
    """One model on one GPU; raises DependencyError or ConfigError when it cannot be served.

    `dtype` "auto" is bfloat16. `num_blocks` overrides `kv_cache_memory_bytes`, which overrides
    what the device has left. `weight_bytes` are read in every step.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: str,
        engine_config: EngineConfig,
        gpu: GpuConfig,
        device: GpuDevice,
        kv_cache_memory_bytes: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        started = time.perf_counter()
        folder = Path(model_folder)
        config = read_model_config(folder)
        precision = resolve_dtype("bfloat16" if dtype == "auto" else dtype)
        self._thread = ModelThread("model")
        loader = GpuLoader(folder, config, precision, engine_config, gpu, device)
        load = partial(
            loader.load, kv_cache_memory_bytes=kv_cache_memory_bytes, num_blocks=num_blocks
        )
        try:
            loaded = self._thread.run(load).result()
        except BaseException:
            self._thread.stop()
            raise
        self._grammars = LlguidanceBackend(
            lambda: GrammarTokenizer.read(folder), vocab_size=config.vocab_size
        )
        self._dispatcher = loaded.model.dispatcher
        self.weight_bytes = loaded.model.weight_bytes
        self._runner: ModelRunner | None = _runner(loaded, engine_config, self._grammars)
        self.info = ExecutorInfo(
            num_blocks=loaded.plan.num_blocks,
            max_model_len=loaded.plan.max_model_len,
            vocab_size=config.vocab_size,
            execution_digest=execution_digest(
                folder, precision, weights=loaded.weights_digest, device=device.name
            ),
        )
        self._submitted: deque[Future[ModelRunnerOutput]] = deque()
        self._thread.set_background(loaded.background)
        _log.info(
            "model ready folder=%s device=%r dtype=%s num_blocks=%d max_model_len=%d took_s=%.1f",
            folder,
            device.name,
            dtype_name(precision),
            loaded.plan.num_blocks,
            loaded.plan.max_model_len,
            time.perf_counter() - started,
        )

    def submit(self, step: SchedulerOutput) -> None:
        """Take in the next step; its computation starts as soon as those before it are done."""
        assert self._runner is not None, "the executor is closed"
        self._submitted.append(self._thread.run(partial(self._execute, self._runner, step)))

    def _execute(self, runner: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step and note how much of it was padding."""
        before = self._dispatcher.num_padding_tokens
        output = runner.execute(step)
        padding = self._dispatcher.num_padding_tokens - before
        return msgspec.structs.replace(output, num_padding_tokens=padding)

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest submitted step."""
        return self._submitted.popleft().result()

    def wait_for_graphs(self) -> None:
        """Wait until every graph is captured; for measurements and tests."""
        self._thread.wait_until_quiet()

    def close(self) -> None:
        """Give weights and KV cache back, once the submitted steps are over. Idempotent."""
        self._thread.stop()
        self._submitted.clear()
        self._grammars.close()
        self._runner = None
        gc.collect()


def _runner(
    loaded: LoadedGpuModel, engine_config: EngineConfig, grammars: LlguidanceBackend
) -> ModelRunner:
    return ModelRunner(
        loaded.model,
        num_blocks=loaded.plan.num_blocks,
        block_size=engine_config.block_size,
        max_num_seqs=engine_config.max_num_seqs,
        max_model_len=loaded.plan.max_model_len,
        num_host_blocks=engine_config.num_host_blocks,
        grammars=grammars,
        speculation=build_speculation(
            engine_config.speculation, loaded.model, engine_config=engine_config
        ),
        memory=loaded.memory,
        sampler=sample_on_device,
    )

"""The executor that runs a model in this process, on this machine's CPU.

It loads, measures and warms up at construction; what to compute is decided by the scheduler.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.executor import ExecutorInfo
from engine.frontend.sampling_params import SamplingParams
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from worker.cpu.machine import available_memory_bytes, num_cores
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend
from worker.model.config import ModelConfig, read_model_config
from worker.model.dtypes import dtype_name, resolve_dtype
from worker.model.kv_layout import KVLayout, cache_layout, check_state_size
from worker.model.load import load_model
from worker.model.parallel import ALONE, RankGroup
from worker.model.shard import Shard, local_config, shard_of
from worker.model.weights import weights_digest
from worker.runner.memory import (
    KVCachePlan,
    check_host_tier,
    default_kv_bytes,
    plan_kv_cache,
)
from worker.runner.model_runner import ModelRunner
from worker.spec_decode.build import build_speculation

logger = logging.getLogger("prefixfleet.worker.executor")

_WARM_UP_ID = "warm-up"
_WARM_UP_TOKENS = 16


class UniprocExecutor:
    """One model in one process, or one rank of several that share it.

    `num_threads` 0 uses every core this process may run on. `num_blocks` overrides
    `kv_cache_memory_bytes`, which overrides the default share of free memory; what is given is
    shared equally by the ranks. `deterministic` computes a row the same alone and in any batch.
    Raises DependencyError or ConfigError when the folder cannot be
    served.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: str,
        engine_config: EngineConfig,
        num_threads: int = 0,
        kv_cache_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        ranks: RankGroup = ALONE,
        deterministic: bool = False,
    ) -> None:
        started = time.perf_counter()
        torch.set_num_threads(max(1, (num_threads or num_cores()) // ranks.size))
        self._ranks = ranks
        folder = Path(model_folder)
        config = read_model_config(folder)
        precision = resolve_dtype(dtype)
        layout = cache_layout(
            config, block_size=engine_config.block_size, itemsize=precision.itemsize
        )
        shard = shard_of(config, rank=ranks.rank, size=ranks.size)
        local = local_config(config, shard)
        plan = _plan(
            local,
            shard,
            layout,
            precision,
            engine_config,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_blocks=num_blocks,
            ranks=ranks,
        )
        self._grammars = LlguidanceBackend(
            lambda: GrammarTokenizer.read(folder), vocab_size=config.vocab_size
        )
        with ThreadPoolExecutor(1, "digest") as digesting:
            weights = digesting.submit(weights_digest, folder)
            model = load_model(
                folder,
                config,
                dtype=precision,
                num_positions=plan.max_model_len,
                ranks=ranks,
                deterministic=deterministic,
            )
        self._runner: ModelRunner | None = ModelRunner(
            model,
            num_blocks=plan.num_blocks,
            block_size=engine_config.block_size,
            max_num_seqs=engine_config.max_num_seqs,
            max_model_len=plan.max_model_len,
            num_host_blocks=engine_config.num_host_blocks,
            grammars=self._grammars,
            speculation=build_speculation(
                engine_config.speculation, model, engine_config=engine_config
            ),
        )
        self.info = ExecutorInfo(
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            vocab_size=config.vocab_size,
            execution_digest=execution_digest(
                folder, precision, weights=weights.result(), num_ranks=ranks.size
            ),
            kv_groups=layout.groups,
        )
        self._submitted: deque[Callable[[], ModelRunnerOutput]] = deque()
        self._thread = _model_thread() if engine_config.async_depth else None
        _warm_up(self._runner, engine_config.block_size, plan, num_groups=len(layout.windows))
        logger.info(
            "model ready folder=%s dtype=%s threads=%d num_blocks=%d max_model_len=%d took_s=%.1f",
            folder,
            dtype_name(precision),
            torch.get_num_threads(),
            plan.num_blocks,
            plan.max_model_len,
            time.perf_counter() - started,
        )

    def submit(self, step: SchedulerOutput) -> None:
        """Take in the next step; its computation starts now if steps are scheduled ahead."""
        assert self._runner is not None, "the executor is closed"
        compute: Callable[[], ModelRunnerOutput] = partial(self._runner.execute, step)
        self._submitted.append(
            compute if self._thread is None else self._thread.submit(compute).result
        )

    def collect(self) -> ModelRunnerOutput:
        """Compute the oldest submitted step, or wait until the thread has."""
        return self._submitted.popleft()()

    def close(self) -> None:
        """Give weights and KV cache back, once the running step is over. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._submitted.clear()
        self._grammars.close()
        self._runner = None
        self._ranks.leave()
        gc.collect()


def execution_digest(
    folder: Path,
    dtype: torch.dtype,
    *,
    weights: str,
    num_ranks: int = 1,
    device: str | None = None,
) -> str:
    """Return the sha256 (hex) of what decides the tokens: weights, config, dtype, KV dtype, ranks.

    `weights` is the folder's `weights_digest`. Several ranks add up in another order than one
    does, and so does each kind of `device`.
    """
    digest = hashlib.sha256()
    digest.update(weights.encode())
    digest.update((folder / "config.json").read_bytes())
    digest.update(f"\0dtype={dtype_name(dtype)} kv={dtype_name(dtype)}".encode())
    if num_ranks > 1:
        digest.update(f" ranks={num_ranks}".encode())
    if device is not None:
        digest.update(f" device={device}".encode())
    return digest.hexdigest()


def _model_thread() -> ThreadPoolExecutor:
    """Return a thread for steps that are scheduled ahead, with as many helpers as this one has."""
    return ThreadPoolExecutor(
        1, "model", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    )


def _plan(
    config: ModelConfig,
    shard: Shard,
    layout: KVLayout,
    dtype: torch.dtype,
    engine_config: EngineConfig,
    *,
    kv_cache_memory_bytes: int | None,
    num_blocks: int | None,
    ranks: RankGroup,
) -> KVCachePlan:
    """Size the KV cache, which has the precision of the weights; all ranks get as many blocks."""
    check_state_size(config, num_channels=len(shard.channels), block_size=engine_config.block_size)
    bytes_per_token = 2 * layout.num_rows * config.num_kv_heads * config.head_dim * dtype.itemsize
    tokens_per_block = layout.attention_block_size or engine_config.block_size
    bytes_per_block = bytes_per_token * tokens_per_block
    available_bytes = available_memory_bytes() // ranks.size
    kv_bytes = default_kv_bytes(available_bytes)
    if kv_cache_memory_bytes is not None:
        kv_bytes = kv_cache_memory_bytes // ranks.size
    if num_blocks is None and ranks.size > 1:
        num_blocks = ranks.smallest(kv_bytes // bytes_per_block)
    if engine_config.num_host_blocks:
        check_host_tier(
            num_host_blocks=engine_config.num_host_blocks,
            bytes_per_block=bytes_per_block,
            available_bytes=available_bytes,
        )
    return plan_kv_cache(
        kv_bytes=kv_bytes,
        bytes_per_block=bytes_per_block,
        block_size=tokens_per_block,
        num_blocks=num_blocks,
        model_limit=config.max_position,
        configured_limit=engine_config.max_model_len,
    )


def _warm_up(runner: ModelRunner, block_size: int, plan: KVCachePlan, *, num_groups: int) -> None:
    """Run one chunk and one decode, so that no client waits for first-time work.

    It writes block 1, which nobody has been given yet.
    """
    num_tokens = min(_WARM_UP_TOKENS, block_size - 1, plan.max_model_len - 1)
    if num_tokens < 1:
        return
    request = NewRequestData(
        request_id=_WARM_UP_ID,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=[[1]] * num_groups,
        sampling=SamplingParams(temperature=0.0),
    )
    runner.execute(_step(new=[request], scheduled=num_tokens, computed=0))
    runner.execute(_step(new=[], scheduled=1, computed=num_tokens))
    runner.execute(
        SchedulerOutput(
            step=0,
            new_requests=[],
            new_block_ids={},
            num_scheduled_tokens={},
            num_computed_tokens={},
            dropped_request_ids=[_WARM_UP_ID],
        )
    )


def _step(*, new: list[NewRequestData], scheduled: int, computed: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        new_requests=new,
        new_block_ids={},
        num_scheduled_tokens={_WARM_UP_ID: scheduled},
        num_computed_tokens={_WARM_UP_ID: computed},
        dropped_request_ids=[],
    )

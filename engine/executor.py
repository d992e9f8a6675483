"""The seam to whatever computes: a model on this machine, on many, or a script.

Implementations: ScriptedExecutor (engine, deterministic tokens), worker.executors (models).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.kv_groups.spec import ONE_FULL_ATTENTION_GROUP, KVGroupSpec
from engine.output import ModelRunnerOutput, SchedulerOutput


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine core must know of the model behind an executor.

    `num_blocks` includes the null block 0. `execution_digest` covers weights, dtype, quantization
    and KV dtype: two executors with equal digests give the same tokens. `kv_groups`: which layers
    keep which part of the past; block tables come in this order.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    execution_digest: str
    kv_groups: tuple[KVGroupSpec, ...] = ONE_FULL_ATTENTION_GROUP


class Executor(Protocol):
    """Runs steps, one at a time."""

    @property
    def info(self) -> ExecutorInfo:
        """Capacity and identity, known once constructed."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; any exception means that the executor is lost."""
        ...

    def close(self) -> None:
        """Free memory, processes and sockets. Idempotent."""
        ...

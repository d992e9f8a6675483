"""The seam to whatever computes: a model on this machine, on many, or a script.

Implementations: ScriptedExecutor (engine, deterministic tokens), worker.executors (models).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.kv_groups.spec import ONE_FULL_ATTENTION_GROUP, KVGroupSpec
from engine.output import ModelRunnerOutput, SchedulerOutput
from kvindex.foundation.errors import PrefixFleetError


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


class OutOfDeviceMemoryError(PrefixFleetError):
    """Raised when a step needs more memory than the device has left; see `Executor.collect`."""


class Executor(Protocol):
    """Computes steps one after the other, in the order in which they are submitted."""

    @property
    def info(self) -> ExecutorInfo:
        """Capacity and identity, known once constructed."""
        ...

    def submit(self, step: SchedulerOutput) -> None:
        """Take in the next step; it may be computed at any time up to its `collect`."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """Return what the oldest submitted step computed, once it has; call it once per step.

        OutOfDeviceMemoryError: the step was taken in up to its moves, but not computed; nor is
        any later one, each `collect` raising the same, until a resync.
        OutOfStepError: neither this step nor any later one was taken in, nothing is in flight any
        more, and the next step that is submitted is a resync.
        Any other exception means that the executor is lost.
        """
        ...

    def close(self) -> None:
        """Free memory, processes and sockets. Idempotent."""
        ...


def execute(executor: Executor, step: SchedulerOutput) -> ModelRunnerOutput:
    """Compute one step now; nothing else may be in flight."""
    executor.submit(step)
    return executor.collect()

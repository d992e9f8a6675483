"""What a runner process says to the executor that started it; steps go the other way as frames.

Every frame has one answer, in order; `number` counts the frames from 1.
"""

from __future__ import annotations

import msgspec

from engine.executor import ExecutorInfo
from engine.output import ModelRunnerOutput


class RunnerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and warm; steps may come."""

    info: ExecutorInfo


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """A step was computed."""

    number: int
    output: ModelRunnerOutput


class StepRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A step does not follow what came before it; KV cache and host tier are as they were."""

    number: int
    reason: str


class StepOutOfMemory(msgspec.Struct, frozen=True, tag="out_of_memory"):
    """A step was taken in up to its moves, but not computed."""

    number: int
    reason: str


StepAnswer = StepDone | StepRefused | StepOutOfMemory
FromRunner = RunnerReady | StepAnswer

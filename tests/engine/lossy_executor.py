"""A scripted executor behind a border that loses, spoils and repeats steps, or the whole runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

from engine.executor import Executor, ExecutorInfo
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.step_stream import OutOfStepError, StepReceiver, StepSender

Fault = Literal["lost", "spoiled", "repeated", "restarted", "died"]
"""What happens to a step; `restarted`: a new receiver, the old memory; `died`: a new runner."""


class LossyExecutor:
    """Executor over one made by `make_runner`; `faults` are by submitted step, from 1."""

    def __init__(self, make_runner: Callable[[], Executor], faults: Mapping[int, Fault]) -> None:
        self._make_runner = make_runner
        self._faults = faults
        self.runner = make_runner()
        self._sender = StepSender()
        self._receiver = StepReceiver()
        self._submitted: deque[tuple[Fault | None, bytes]] = deque()
        self._num_submitted = 0
        self.resyncs: list[SchedulerOutput] = []

    @property
    def info(self) -> ExecutorInfo:
        return self.runner.info

    def submit(self, step: SchedulerOutput) -> None:
        self._num_submitted += 1
        if step.resync:
            self.resyncs.append(step)
        fault = self._faults.get(self._num_submitted)
        self._submitted.append((fault, self._sender.frame(step)))

    def collect(self) -> ModelRunnerOutput:
        fault, frame = self._submitted.popleft()
        frames = [frame]
        match fault:
            case "died":
                self.runner, self._receiver = self._make_runner(), StepReceiver()
                raise self._fail("the runner died", kv_lost=True)
            case "restarted":
                self._receiver = StepReceiver()
            case "spoiled":
                frames = [frame[:-1] + bytes([frame[-1] ^ 1])]
            case "repeated":
                frames = [frame, frame]
            case "lost":
                assert self._submitted, "nobody sees that the last step is lost"
                frames = [self._submitted[0][1]]
        try:
            steps = [self._receiver.take(frame) for frame in frames]
        except OutOfStepError as error:
            raise self._fail(str(error), kv_lost=False) from None
        (step,) = steps
        self.runner.submit(step)
        return self.runner.collect()

    def close(self) -> None:
        self.runner.close()

    def _fail(self, reason: str, *, kv_lost: bool) -> OutOfStepError:
        self._submitted.clear()
        return OutOfStepError(reason, kv_lost=kv_lost)

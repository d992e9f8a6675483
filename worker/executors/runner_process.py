"""The runner process: one loop that takes in steps and says what came of them.

It is started by ProcessExecutor, alone or as one rank of several, and dies with it; whatever goes
wrong in the model ends it, and the executor starts another. It knows no requests beyond the steps.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec
import zmq

from engine.executor import Executor, OutOfDeviceMemoryError, execute
from engine.step_stream import OutOfStepError, StepReceiver
from kvindex.foundation.errors import PrefixFleetError
from kvindex.foundation.logs import setup_logging
from worker.core.garbage import load_without_collecting, settle_after_loading
from worker.core.spec import CoreSpec
from worker.executors.build import build_local_executor
from worker.executors.runner_messages import (
    RunnerReady,
    StepAnswer,
    StepDone,
    StepOutOfMemory,
    StepRefused,
)

_log = logging.getLogger("prefixfleet.runner")


def serve(executor: Executor, *, steps: zmq.Socket[bytes], answers: zmq.Socket[bytes]) -> None:
    """Answer every frame with one message, for ever; an exception of the model ends it."""
    runner = FrameRunner(executor)
    answers.send(runner.ready())
    while True:
        answers.send(runner.answer(steps.recv()))


class FrameRunner:
    """Computes the frames of one stream of steps; messages go in and out encoded."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._encoder = msgspec.msgpack.Encoder()
        self._receiver = StepReceiver()
        self._num_frames = 0

    def ready(self) -> bytes:
        """Return what a runner says first."""
        return self._encoder.encode(RunnerReady(self._executor.info))

    def answer(self, frame: bytes) -> bytes:
        """Compute a frame; an exception of the model is raised."""
        self._num_frames += 1
        return self._encoder.encode(self._compute(frame, self._num_frames))

    def _compute(self, frame: bytes, number: int) -> StepAnswer:
        try:
            step = self._receiver.take(frame)
        except OutOfStepError as error:
            return StepRefused(number, str(error))
        try:
            return StepDone(number, execute(self._executor, step))
        except OutOfDeviceMemoryError as error:
            return StepOutOfMemory(number, str(error))


def main() -> int:
    """Run the runner described by the JSON on standard input."""
    # The front decides when this ends; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSpec)
    setup_logging(f"{spec.replica_id}-runner")
    try:
        executor = build_local_executor(spec)
    except PrefixFleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 3
    settle_after_loading()
    with zmq.Context() as context:
        steps, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        steps.setsockopt(zmq.RCVHWM, 0)
        answers.setsockopt(zmq.SNDHWM, 0)
        steps.bind(spec.input_endpoint)
        answers.connect(spec.output_endpoint)
        try:
            serve(executor, steps=steps, answers=answers)
        except Exception:  # noqa: BLE001 - the process ends here, and its end is noticed
            _log.exception("runner failed")
        finally:
            steps.close(linger=0)
            answers.close(linger=0)
            executor.close()
    return 1


if __name__ == "__main__":
    load_without_collecting()
    raise SystemExit(main())

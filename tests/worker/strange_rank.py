"""A runner process whose rank 1 goes wrong in its third step, as the environment tells it.

`other_tokens`: it samples something else. `out_of_memory`: it says so, and rank 0 waits for it
for ever, as it does in a collective operation.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import zmq

from engine.executor import Executor, ExecutorInfo, OutOfDeviceMemoryError
from engine.output import ModelRunnerOutput, SchedulerOutput
from worker.core.spec import CoreSpec
from worker.executors.build import build_local_executor
from worker.executors.runner_process import serve

FAULT = "PREFIXFLEET_TEST_FAULT"
_FAULTY_STEP = 3


class StrangeExecutor:
    """An executor with a fault."""

    def __init__(self, executor: Executor, *, rank: int, fault: str | None) -> None:
        self._executor = executor
        self._rank = rank
        self._fault = fault
        self._step = 0

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def submit(self, step: SchedulerOutput) -> None:
        self._step += 1
        self._executor.submit(step)

    def collect(self) -> ModelRunnerOutput:
        output = self._executor.collect()
        if self._step != _FAULTY_STEP or self._fault is None:
            return output
        if self._fault == "out_of_memory":
            if self._rank == 0:
                signal.pause()
            raise OutOfDeviceMemoryError("no memory left on rank 1")
        if self._rank == 0:
            return output
        other = {request_id: [250] for request_id in output.sampled_token_ids}
        return msgspec.structs.replace(output, sampled_token_ids=other)

    def close(self) -> None:
        self._executor.close()


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSpec)
    assert spec.tensor_parallel_rank is not None
    executor = StrangeExecutor(
        build_local_executor(spec),
        rank=spec.tensor_parallel_rank.rank,
        fault=os.environ.get(FAULT),
    )
    context = zmq.Context()
    steps, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    steps.bind(spec.input_endpoint)
    answers.connect(spec.output_endpoint)
    serve(executor, steps=steps, answers=answers)


if __name__ == "__main__":
    main()

"""A recording of what a runner was told and what it sampled, and its replay on another runner.

The log holds frames of the step protocol, so a damaged one is noticed. It holds the token ids of
every prompt: treat it like the prompts. It knows streams, not where they are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import BinaryIO, Literal

import msgspec

from engine.executor import Executor, ExecutorInfo, OutOfDeviceMemoryError, execute
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.runner_state import RunnerState
from engine.step_stream import OutOfStepError, StepReceiver, StepSender
from kvindex.foundation.errors import PrefixFleetError

LOG_FORMAT = "prefixfleet-step-log/1"
_LENGTH_BYTES = 4


class StepLogError(PrefixFleetError):
    """Raised when a log cannot be read, or its replay differs; says at which step."""


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first record: the format, and the executor that was recorded."""

    format: str = LOG_FORMAT
    info: ExecutorInfo


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """A step was submitted; `frame` is one of the step protocol."""

    frame: bytes


class OutputRecord(msgspec.Struct, frozen=True, tag="output"):
    """The oldest submitted step returned."""

    output: ModelRunnerOutput


class FailureRecord(msgspec.Struct, frozen=True, tag="failure"):
    """The oldest submitted step was not computed, or no submitted step was even taken in."""

    kind: Literal["out_of_memory", "out_of_step"]


Record = StepRecord | OutputRecord | FailureRecord


class RecordingExecutor:
    """An executor that writes down what another one is told and answers.

    Every record is flushed; closing the stream is its owner's business.
    """

    def __init__(self, executor: Executor, stream: BinaryIO) -> None:
        self._executor = executor
        self._stream = stream
        self._sender = StepSender()
        self._encoder = msgspec.msgpack.Encoder()
        self._write(StepLogHeader(info=executor.info))

    @property
    def info(self) -> ExecutorInfo:
        """That of the recorded executor."""
        return self._executor.info

    def submit(self, step: SchedulerOutput) -> None:
        """Record a step and pass it on."""
        self._write(StepRecord(self._sender.frame(step)))
        self._executor.submit(step)

    def collect(self) -> ModelRunnerOutput:
        """Pass an output on and record it, or that there is none."""
        try:
            output = self._executor.collect()
        except OutOfDeviceMemoryError:
            self._write(FailureRecord("out_of_memory"))
            raise
        except OutOfStepError:
            self._write(FailureRecord("out_of_step"))
            raise
        self._write(OutputRecord(output))
        return output

    def close(self) -> None:
        """Close the recorded executor. Idempotent."""
        self._executor.close()

    def _write(self, record: StepLogHeader | Record) -> None:
        payload = self._encoder.encode(record)
        self._stream.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
        self._stream.flush()


class StepLog:
    """A log that is being read; StepLogError when the stream does not hold one.

    `is_truncated`: the last record is cut off, as after a crash; what is before it counts.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = msgspec.msgpack.Decoder(Record)
        self.is_truncated = False
        payload = self._read()
        try:
            self.header = msgspec.msgpack.decode(payload or b"", type=StepLogHeader)
        except msgspec.DecodeError as error:
            raise StepLogError(f"not a step log: {error}") from None
        if self.header.format != LOG_FORMAT:
            raise StepLogError(f"the log is a {self.header.format!r}; expected {LOG_FORMAT!r}")

    def records(self) -> Iterator[Record]:
        """Yield the records in order."""
        while (payload := self._read()) is not None:
            try:
                yield self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise StepLogError(f"a record does not decode: {error}") from None

    def _read(self) -> bytes | None:
        length = self._stream.read(_LENGTH_BYTES)
        payload = self._stream.read(int.from_bytes(length, "big")) if length else b""
        if len(length) < _LENGTH_BYTES or len(payload) < int.from_bytes(length, "big"):
            self.is_truncated = bool(length)
            return None
        return payload


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay computed: steps, and the sampled tokens by request id, all as recorded."""

    num_steps: int
    sampled_token_ids: dict[str, list[int]]


def replay(log: StepLog, executor: Executor) -> Replay:
    """Compute the steps of a log again, one after the other, and compare every sample.

    StepLogError at the first difference, for an executor of another model or with fewer blocks,
    and for a log that contradicts itself.
    """
    _check_executor(log.header.info, executor.info)
    run = _ReplayRun(executor)
    for record in log.records():
        match record:
            case StepRecord(frame=frame):
                run.submit(frame)
            case OutputRecord(output=output):
                run.compare(output)
            case FailureRecord(kind=kind):
                run.fail(kind)
    return Replay(num_steps=run.num_steps, sampled_token_ids=run.sampled)


class _ReplayRun:
    """A replay under way; `submitted` steps have not returned in the recording."""

    def __init__(self, executor: Executor) -> None:
        self.num_steps = 0
        self.sampled: dict[str, list[int]] = {}
        self._executor = executor
        self._receiver = StepReceiver()
        self._state = RunnerState()
        self._submitted: deque[SchedulerOutput] = deque()

    def submit(self, frame: bytes) -> None:
        """Take in the next step."""
        try:
            self._submitted.append(self._receiver.take(frame))
        except OutOfStepError as error:
            raise StepLogError(f"the log is damaged: {error}") from None

    def compare(self, recorded: ModelRunnerOutput) -> None:
        """Compute the oldest step and compare what it samples."""
        step = self._oldest("an output")
        self._fold(step)
        output = execute(self._executor, step)
        for field in ("sampled_token_ids", "errors"):
            was, now = getattr(recorded, field), getattr(output, field)
            if was != now:
                raise StepLogError(f"step {step.step}: {field} was {was}, now it is {now}")
        self._state.take_output(output)
        for request_id, token_ids in output.sampled_token_ids.items():
            self.sampled.setdefault(request_id, []).extend(token_ids)
        self.num_steps += 1

    def fail(self, kind: Literal["out_of_memory", "out_of_step"]) -> None:
        """Leave out what was not computed; a step without memory still moves its blocks."""
        if kind == "out_of_step":
            self._submitted.clear()
            return
        step = self._oldest("a failure")
        step = msgspec.structs.replace(step, num_scheduled_tokens={}, num_computed_tokens={})
        self._fold(step)
        execute(self._executor, step)

    def _oldest(self, what: str) -> SchedulerOutput:
        if not self._submitted:
            raise StepLogError(f"the log has {what} without a step")
        return self._submitted.popleft()

    def _fold(self, step: SchedulerOutput) -> None:
        try:
            self._state.take_step(step)
        except ValueError as error:
            raise StepLogError(str(error)) from None


def _check_executor(recorded: ExecutorInfo, given: ExecutorInfo) -> None:
    if recorded.execution_digest != given.execution_digest:
        raise StepLogError(
            f"the log is of model {recorded.execution_digest}, "
            f"the executor has {given.execution_digest}"
        )
    if given.num_blocks < recorded.num_blocks:
        raise StepLogError(
            f"the log needs {recorded.num_blocks} blocks, the executor has {given.num_blocks}"
        )

"""The executor that runs the model in a process of its own, and starts another when that dies.

A dead runner costs what was in its KV cache; the requests go on, computed again. Steps are sent
ahead, so the model computes one while the next is scheduled. It knows no scheduler.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from engine.executor import ExecutorInfo, OutOfDeviceMemoryError
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.step_stream import OutOfStepError, StepSender
from kvindex.foundation.errors import DependencyError
from worker.core.core_link import CoreSockets, decode, start_child
from worker.core.spec import CoreSpec
from worker.executors.runner_messages import (
    FromRunner,
    RunnerReady,
    StepDone,
    StepOutOfMemory,
    StepRefused,
)

_log = logging.getLogger("prefixfleet.worker.executor")
_DEATH_CHECK_MS = 20
_LAST_ANSWER_MS = 100


class ProcessExecutor:
    """Executor over a runner process; DependencyError when that cannot start.

    It belongs to one thread, which the runner does not outlive. `start_timeout_s` bounds every
    start, also that of a runner which takes the place of a dead one.
    """

    def __init__(self, spec: CoreSpec, *, start_timeout_s: float = 300.0) -> None:
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
        self._sender = StepSender()
        self._num_submitted = 0
        self._num_void = 0  # answers to come that nobody waits for
        self._folder = _socket_folder(spec)
        self._process: subprocess.Popen[bytes] | None = None
        self.info: ExecutorInfo = self._start()
        # A runner that takes its place must have as many blocks, whatever memory is free then.
        self._spec = msgspec.structs.replace(spec, num_blocks=self.info.num_blocks)

    @property
    def pid(self) -> int:
        """Process id of the runner."""
        assert self._process is not None, "the executor is closed"
        return self._process.pid

    def submit(self, step: SchedulerOutput) -> None:
        """Send a step; it is computed as soon as those before it are."""
        self._num_submitted += 1
        self._sockets.input.send(self._sender.frame(step))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step; see Executor. A runner that died has been replaced then."""
        while self._num_void:
            self._next_answer()
            self._num_void -= 1
        answer = self._next_answer()
        self._num_submitted -= 1
        match answer:
            case StepDone(output=output):
                return output
            case StepOutOfMemory(reason=reason):
                raise OutOfDeviceMemoryError(reason)
            case StepRefused(reason=reason):
                # Each step has one answer: those in flight are refused as well.
                self._num_void, self._num_submitted = self._num_submitted, 0
                raise OutOfStepError(reason)
            case RunnerReady():
                raise AssertionError("a runner is ready twice")

    def close(self) -> None:
        """End the runner, whatever it does; leaves no process and no file. Idempotent."""
        if self._process is None:
            return
        self._stop()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> ExecutorInfo:
        """Start a runner and wait until it can compute; nothing is left when it cannot."""
        self._sockets = CoreSockets(self._folder, zmq.Context())
        process = start_child("worker.executors.runner_process", self._sockets.told_to(self._spec))
        self._process = process
        try:
            answer = self._receive(self._start_timeout_s)
        except BaseException:
            self.close()
            raise
        if isinstance(answer, RunnerReady):
            return answer.info
        end = f"ended with exit code {process.poll()}"
        if process.poll() is None:
            end = f"was not ready in {self._start_timeout_s:g} s"
        self.close()
        raise DependencyError(f"the runner of {self._spec.replica_id} {end}")

    def _next_answer(self) -> FromRunner:
        """Return the next answer; replace a runner that died, and raise OutOfStepError."""
        answer = self._receive(None)
        if answer is not None:
            return answer
        assert self._process is not None
        reason = f"the runner ended with exit code {self._process.returncode}"
        _log.error("%s, starting another pid=%d", reason, self.pid)
        self._stop()
        self._num_submitted = self._num_void = 0
        info = self._start()
        if info != self.info:
            self.close()
            raise DependencyError(f"the model changed under a running engine: {info}")
        raise OutOfStepError(reason, kv_lost=True)

    def _receive(self, timeout_s: float | None) -> FromRunner | None:
        """Return the next message, None when the runner is gone or the time is up."""
        assert self._process is not None, "the executor is closed"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_dead = self._process.poll() is not None
            if self._sockets.output.poll(_LAST_ANSWER_MS if is_dead else _DEATH_CHECK_MS):
                answer = decode(self._decoder, self._sockets.output.recv(), _log)
                if answer is not None:
                    return answer
            elif is_dead or (deadline is not None and time.monotonic() > deadline):
                return None

    def _stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._sockets.close()


def _socket_folder(spec: CoreSpec) -> Path:
    """Return a folder for the sockets: beside the core's, which its front removes at the end."""
    core_socket = spec.output_endpoint.removeprefix("ipc://")
    if core_socket:
        return Path(core_socket).parent / "runner"
    return Path(tempfile.mkdtemp(prefix="prefixfleet-runner-"))

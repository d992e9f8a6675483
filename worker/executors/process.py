"""The executor that runs the model in processes of its own, and starts others when one dies.

One process, or one per tensor-parallel rank. A dead one costs what was in the KV cache; the
requests go on, computed again. Steps are sent ahead, so the model computes one while the next is
scheduled. It knows no scheduler.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.executor import ExecutorInfo, OutOfDeviceMemoryError
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.rank_reports import RankReports
from engine.step_stream import OutOfStepError, StepSender
from kvindex.foundation.errors import DependencyError
from worker.core.spec import CoreSpec
from worker.executors.rank_processes import RankProcesses
from worker.executors.ranks import Ranks, RanksLostError
from worker.executors.runner_messages import (
    RunnerReady,
    StepAnswer,
    StepDone,
    StepOutOfMemory,
    StepRefused,
)

_log = logging.getLogger("prefixfleet.worker.executor")
StepReport = tuple[int, str, int]
"""A rank's answer, as far as all must give the same: its number, its kind, a checksum."""


class ProcessExecutor:
    """Executor over runner processes; DependencyError when they cannot start.

    It belongs to one thread, which they do not outlive. `start_timeout_s` bounds every start,
    also of those that take the place of dead ones. A step counts when every rank answers it, and
    all with the same tokens; when one dies or parts from the others, all are replaced. Ranks meet
    several times in every layer, so they answer together: one that is silent for `agreement_s`
    after another answered waits in vain, or has gone another way. `launch` starts them, given
    a folder for their sockets.
    """

    def __init__(
        self,
        spec: CoreSpec,
        *,
        start_timeout_s: float = 300.0,
        agreement_s: float = 2.0,
        launch: Callable[[CoreSpec, Path], Ranks] = RankProcesses,
    ) -> None:
        self._spec = spec
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._agreement_s = agreement_s
        self._sender = StepSender()
        self._reports: RankReports[StepReport] = RankReports(spec.tensor_parallel_size)
        self._num_submitted = 0
        self._num_void = 0  # answers to come that nobody waits for
        self._num_answered = 0
        self._answers: dict[int, StepAnswer] = {}  # of rank 0, by number, not yet common
        self._lost: str | None = None  # why ranks were replaced, until the core is told
        self._folder = _socket_folder(spec)
        self._ranks: Ranks | None = None
        self.info: ExecutorInfo = self._start()
        # Ranks that take their place must have as many blocks, whatever memory is free then.
        self._spec = msgspec.structs.replace(spec, num_blocks=self.info.num_blocks)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._running.pids

    @property
    def pid(self) -> int:
        """Process id of rank 0."""
        return self.pids[0]

    def submit(self, step: SchedulerOutput) -> None:
        """Send a step; it is computed as soon as those before it are."""
        if self._lost is None:
            self._num_submitted += 1
            self._running.send(self._sender.frame(step))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step; see Executor. Ranks that died have been replaced then."""
        if self._lost is not None:
            reason, self._lost = self._lost, None
            raise OutOfStepError(reason, kv_lost=True)
        try:
            while self._num_void:
                self._next_answer()
                self._num_void -= 1
            answer = self._next_answer()
        except RanksLostError as error:
            self._replace(str(error))
            if error.shortage is None:
                raise OutOfStepError(str(error), kv_lost=True) from None
            self._lost = str(error)
            raise OutOfDeviceMemoryError(error.shortage) from None
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

    def close(self) -> None:
        """End the ranks, whatever they do; leaves no process and no file. Idempotent."""
        if self._ranks is None:
            return
        self._ranks.stop()
        self._ranks = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _running(self) -> Ranks:
        assert self._ranks is not None, "the executor is closed"
        return self._ranks

    def _start(self) -> ExecutorInfo:
        """Start all ranks and wait until they can compute; nothing is left when one cannot."""
        self._ranks = self._launch(self._spec, self._folder)
        try:
            infos = self._ready_infos()
        except RanksLostError as error:
            self.close()
            raise DependencyError(f"{self._spec.replica_id} cannot start: {error}") from None
        except BaseException:
            self.close()
            raise
        if any(info != infos[0] for info in infos):
            self.close()
            raise DependencyError(f"the ranks of {self._spec.replica_id} differ: {infos}")
        return infos[0]

    def _ready_infos(self) -> list[ExecutorInfo]:
        deadline = time.monotonic() + self._start_timeout_s
        infos: dict[int, ExecutorInfo] = {}
        while len(infos) < self._spec.tensor_parallel_size:
            received = self._running.receive(deadline)
            if received is None:
                raise DependencyError(
                    f"the runner of {self._spec.replica_id} was not ready in "
                    f"{self._start_timeout_s:g} s"
                )
            rank, answer = received
            assert isinstance(answer, RunnerReady), "a runner answers before it is ready"
            infos[rank] = answer.info
        return [infos[rank] for rank in sorted(infos)]

    def _next_answer(self) -> StepAnswer:
        """Return what every rank answers to the oldest frame; RanksLostError if they do not."""
        number, deadline, shortage = self._num_answered + 1, None, None
        while True:
            received = self._running.receive(deadline)
            if received is None:
                break
            rank, answer = received
            assert not isinstance(answer, RunnerReady), "a runner is ready twice"
            report = _report(answer)
            if rank == 0:
                self._answers[report[0]] = answer
            if isinstance(answer, StepOutOfMemory):
                shortage = answer.reason
            if self._reports.add(rank, report):
                if report[0] != number:
                    break
                self._num_answered = number
                return self._answers.pop(number)
            if deadline is None:
                deadline = time.monotonic() + self._agreement_s
        raise RanksLostError(f"the ranks part at answer {number}", shortage=shortage)

    def _replace(self, reason: str) -> None:
        """End every rank and start anew; their KV is gone."""
        _log.error("%s, starting anew pids=%s", reason, self.pids)
        self._running.stop()
        self._num_submitted = self._num_void = 0
        self._reports.clear()
        self._answers.clear()
        self._num_answered = 0
        info = self._start()
        if info != self.info:
            self.close()
            raise DependencyError(f"the model changed under a running engine: {info}")


def _report(answer: StepAnswer) -> StepReport:
    """Return what of an answer every rank must give alike."""
    content = b""
    if isinstance(answer, StepDone):
        content = msgspec.msgpack.encode((answer.output.sampled_token_ids, answer.output.errors))
    return answer.number, type(answer).__name__, zlib.crc32(content)


def _socket_folder(spec: CoreSpec) -> Path:
    """Return a folder for the sockets: beside the core's, which its front removes at the end."""
    core_socket = spec.output_endpoint.removeprefix("ipc://")
    if core_socket:
        return Path(core_socket).parent / "runner"
    return Path(tempfile.mkdtemp(prefix="prefixfleet-runner-"))

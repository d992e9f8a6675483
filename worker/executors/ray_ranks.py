"""The ranks of one executor as actors of a Ray cluster, on as many machines as it has.

It has the face of RankProcesses, so death, disagreement and replacement are the executor's as
before. The model folder must be at the same place on every machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from kvindex.foundation.errors import DependencyError
from worker.core.spec import CoreSpec, TensorParallelRank
from worker.executors.ranks import RanksLostError
from worker.executors.runner_messages import FromRunner

try:
    import ray
except ImportError as error:
    raise DependencyError(
        "distributed_executor_backend ray needs Ray; run 'pip install prefixfleet[ray]'"
    ) from error


class RankActor:
    """One rank; runs on whatever machine Ray puts it on."""

    def __init__(self) -> None:
        self._runner: Any = None

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def rendezvous(self) -> str:
        """Return a TCP URL on this machine that is free now."""
        util: Any = ray.util
        address: str = util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def start(self, spec: bytes) -> bytes:
        """Load the rank's part of the model; return what a runner says when it is ready."""
        from worker.executors.build import build_local_executor
        from worker.executors.runner_process import FrameRunner

        self._runner = FrameRunner(build_local_executor(msgspec.json.decode(spec, type=CoreSpec)))
        ready: bytes = self._runner.ready()
        return ready

    def answer(self, frame: bytes) -> bytes:
        """Compute a step."""
        answer: bytes = self._runner.answer(frame)
        return answer


class RayRanks:
    """An actor for each rank that `spec` asks for, on the cluster that RAY_ADDRESS names.

    Without one, Ray starts a cluster on this machine. Each actor takes as many of Ray's CPUs as it
    has threads; if they are not there, it waits for them.
    """

    def __init__(self, spec: CoreSpec, folder: Path) -> None:
        self._decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        size = spec.tensor_parallel_size
        remote: Any = ray.remote(RankActor)
        actor = remote.options(num_cpus=max(1, spec.num_threads // size))
        self._actors: list[Any] = [actor.remote() for _ in range(size)]
        self._answers: list[deque[Any]] = [deque() for _ in range(size)]
        rendezvous: str = ray.get(self._actors[0].rendezvous.remote())
        self.pids: list[int] = ray.get([each.pid.remote() for each in self._actors])
        for rank, each in enumerate(self._actors):
            place = TensorParallelRank(rank, size, rendezvous)
            told = msgspec.json.encode(msgspec.structs.replace(spec, tensor_parallel_rank=place))
            self._answers[rank].append(each.start.remote(told))

    def send(self, frame: bytes) -> None:
        """Send a step to every rank; never blocks."""
        for actor, answers in zip(self._actors, self._answers, strict=True):
            answers.append(actor.answer.remote(frame))

    def receive(self, deadline: float | None) -> tuple[int, FromRunner] | None:
        """Return the next answer and its rank; see Ranks."""
        rank_of = {answers[0]: rank for rank, answers in enumerate(self._answers) if answers}
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(rank_of), num_returns=1, timeout=timeout_s)
        if not ready:
            return None
        rank = rank_of[ready[0]]
        self._answers[rank].popleft()
        try:
            return rank, self._decoder.decode(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            raise RanksLostError(f"rank {rank} ended: {_first_line(error)}") from error

    def stop(self) -> None:
        """End every rank, whatever it does. Idempotent."""
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._answers.clear()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]

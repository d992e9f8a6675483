"""The runner processes of one executor on this machine, a rank each, and the sockets to them.

It starts them together, notices when one is gone and ends them all. What they are told and what
they answer is the executor's business.
"""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path

import msgspec
import zmq

from worker.core.core_link import CoreSockets, decode, start_child
from worker.core.spec import CoreSpec, TensorParallelRank
from worker.executors.ranks import RanksLostError
from worker.executors.runner_messages import FromRunner

_log = logging.getLogger("prefixfleet.worker.executor")
_DEATH_CHECK_MS = 20
_LAST_ANSWER_MS = 50
RUNNER_MODULE = "worker.executors.runner_process"


class RankProcesses:
    """One process for each rank that `spec` asks for; the calling thread owns them.

    `folder` holds their sockets, and where several ranks find each other; each runs `module`.
    """

    def __init__(self, spec: CoreSpec, folder: Path, *, module: str = RUNNER_MODULE) -> None:
        self._decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rendezvous = folder / "rendezvous"
        self._rendezvous.unlink(missing_ok=True)
        self._sockets: list[CoreSockets[zmq.Socket[bytes]]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._poller = zmq.Poller()
        size = spec.tensor_parallel_size
        for rank in range(size):
            place = None
            if size > 1:
                place = TensorParallelRank(rank, size, f"file://{self._rendezvous}")
            sockets = CoreSockets(folder / f"rank{rank}", zmq.Context())
            told = sockets.told_to(msgspec.structs.replace(spec, tensor_parallel_rank=place))
            self._sockets.append(sockets)
            self._poller.register(sockets.output, zmq.POLLIN)
            self._processes.append(start_child(module, told))

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def send(self, frame: bytes) -> None:
        """Send a step to every rank; never blocks."""
        for sockets in self._sockets:
            sockets.input.send(frame)

    def receive(self, deadline: float | None) -> tuple[int, FromRunner] | None:
        """Return the next answer and its rank, None at the deadline (`time.monotonic`).

        RanksLostError as soon as any rank is dead and no answer is left.
        """
        while True:
            end = self._death()
            ready = self._poller.poll(_DEATH_CHECK_MS if end is None else _LAST_ANSWER_MS)
            readable = {socket for socket, _ in ready}
            for rank, sockets in enumerate(self._sockets):
                if sockets.output in readable:
                    answer = decode(self._decoder, sockets.output.recv(), _log)
                    if answer is not None:
                        return rank, answer
            if not ready and end is not None:
                raise RanksLostError(end)
            if not ready and deadline is not None and time.monotonic() > deadline:
                return None

    def stop(self) -> None:
        """End every rank, whatever it does, and close the sockets. Idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for sockets in self._sockets:
            sockets.close()
        self._processes.clear()
        self._sockets.clear()
        self._rendezvous.unlink(missing_ok=True)

    def _death(self) -> str | None:
        """Return how the first dead rank ended, None while all live."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                who = "the runner" if len(self._processes) == 1 else f"rank {rank}"
                return f"{who} ended with exit code {process.returncode}"
        return None

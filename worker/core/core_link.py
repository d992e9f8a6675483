"""How a core or runner process is started and reached: its command line and its two sockets.

Shared by the clients of a core and the executor of a runner. It knows no message.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from kvindex.foundation.die_with_parent import wrap
from worker.core.spec import CoreSpec

_RECONNECT_MS = 10
SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")


def child_argv(module: str) -> list[str]:
    """Return the argument list of a child that runs `module` and dies with this process."""
    return wrap([sys.executable, "-P", "-m", module], signal.SIGKILL)


def core_argv() -> list[str]:
    """Return the argument list of an engine core."""
    return child_argv("worker.core.process")


class CoreSockets(Generic[SocketT]):
    """The starter's end of both sockets; `input` leads to the child, `output` comes from it.

    The child binds `input`: sending to a peer that is not there yet, or not any more, must queue
    and never block. Their files live in `folder`, which belongs to one child alone and is created
    for this user only. The context is closed with them.
    """

    def __init__(self, folder: Path, context: zmq.Context[SocketT]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files = [folder / "core-in.sock", folder / "core-out.sock"]
        self._input_endpoint, self._output_endpoint = (f"ipc://{file}" for file in self._files)
        self._context = context
        self.input = context.socket(zmq.PUSH)
        self.input.setsockopt(zmq.SNDHWM, 0)
        self.input.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.output = context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, 0)
        for file in self._files:
            file.unlink(missing_ok=True)
        self.input.connect(self._input_endpoint)
        self.output.bind(self._output_endpoint)

    def told_to(self, spec: CoreSpec) -> bytes:
        """Encode a spec for the child's standard input, with these sockets as its endpoints."""
        return msgspec.json.encode(
            msgspec.structs.replace(
                spec,
                input_endpoint=self._input_endpoint,
                output_endpoint=self._output_endpoint,
            )
        )

    def close(self) -> None:
        """Close the sockets and remove their files; idempotent."""
        self.input.close(linger=0)
        self.output.close(linger=0)
        self._context.term()
        for file in self._files:
            file.unlink(missing_ok=True)

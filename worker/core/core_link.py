"""How a core or runner process is started and reached: its command line and its two sockets.

Shared by both ends: the clients of a core and the executor of a runner. It knows no message.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from kvindex.foundation.die_with_parent import wrap
from worker.core.spec import CoreSpec

CORE_MODULE = "worker.core.process"
CLOSE_TIMEOUT_S = 5.0
_RECONNECT_MS = 10
AnswerT = TypeVar("AnswerT")
MessageT = TypeVar("MessageT")
SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")


def child_argv(module: str) -> list[str]:
    """Return the argument list of a child that runs `module` and dies with this process."""
    return wrap([sys.executable, "-P", "-m", module], signal.SIGKILL)


def start_child(module: str, spec: bytes) -> subprocess.Popen[bytes]:
    """Start a child that runs `module`, and tell it its spec; it may have ended before it read."""
    process = subprocess.Popen(child_argv(module), stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(spec)
    return process


def decode(
    decoder: msgspec.msgpack.Decoder[MessageT], payload: bytes, log: logging.Logger
) -> MessageT | None:
    """Return a message of the other end, None for one that is logged and dropped.

    Such a message is not from a process of ours: those encode what their peers decode.
    """
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        log.error("dropped a message that does not decode error=%s", error)
        return None


def core_argv() -> list[str]:
    """Return the argument list of an engine core."""
    return child_argv(CORE_MODULE)


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

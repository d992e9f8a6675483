"""The actor that owns one replica: a process on the node where Ray has put it.

It runs the program that the local supervisor would run, ties it to its own life, and tells what it
says and how it ends. Secrets reach that program through a pipe, never by argument, environment or
file. It restarts nothing and knows no gateway.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from kvindex.foundation.die_with_parent import wrap
from router.launch.children import ReplicaSettings, replica_argv, replica_environ, url_of
from router.launch.ports import is_free
from router.launch.process_group import adopt_orphans, end_group
from router.launch.ray_cluster import node_address

PORT_STEP = 64
"""A replica tries its own port, and then every 64th: neighbours on a node never try the same."""

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_CHUNK_BYTES = 1 << 16


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to run: `settings`, in the working directory `folder` if the node has it.

    `on_network` has a replica that would listen on loopback listen on its node's address. `key` is
    the same in every life of a replica, and no other's.
    """

    settings: ReplicaSettings
    on_network: bool
    folder: str
    key: str


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a replica has been started."""

    url: str
    node: str
    pid: int


class Output(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a replica has written to its standard output and error since the last of these."""

    data: bytes


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a replica has ended: its exit code, or a signal's number below 0."""

    code: int


FromActor = Placed | Output | Ended


class ReplicaActor:
    """Runs one replica once; `stop` arrives while `run` is under way, so it takes two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        adopt_orphans()

    def run(self, order: bytes) -> Iterator[bytes]:
        """Run a replica to its end; yield one Placed, any number of Output, one Ended.

        The kernel ties the process to the thread that started it, which is this one.
        """
        asked = msgspec.msgpack.decode(order, type=ReplicaOrder)
        node = node_address()
        with _socket_dir(asked.key) as socket_dir:
            settings = settle(asked, node=node, socket_dir=socket_dir)
            process = self._start(settings, asked.folder)
            yield _encoded(Placed(url=settings.advertised_url, node=node, pid=process.pid))
            ending = threading.Thread(target=_await_end, args=(process,))
            ending.start()
            assert process.stdout is not None
            for data in _chunks(process.stdout):
                yield _encoded(Output(data=data))
            ending.join()
            yield _encoded(Ended(code=process.returncode))

    def stop(self) -> None:
        """Ask the replica to drain and end; a second call asks it to end at once."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def _start(self, settings: ReplicaSettings, folder: str) -> subprocess.Popen[bytes]:
        with self._lock:
            process = subprocess.Popen(
                wrap(replica_argv("-"), signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder if os.path.isdir(folder) else None,
                env=_environ(settings),
            )
            self._process = process
            if self._stopping:
                process.send_signal(signal.SIGTERM)
        assert process.stdin is not None
        _tell(process.stdin, msgspec.json.encode(settings))
        return process


def _environ(settings: ReplicaSettings) -> dict[str, str]:
    """Return what the replica's environment is on this node.

    Where Ray has given it no GPU, it sees none: they are for those that have asked for one.
    """
    hidden = {} if settings.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **replica_environ(settings), **hidden}


def settle(order: ReplicaOrder, *, node: str, socket_dir: str) -> ReplicaSettings:
    """Return the settings with what only the node knows: address, port, folder of sockets."""
    settings = order.settings
    is_loopback = settings.host in _LOOPBACK_HOSTS
    host = node if order.on_network and is_loopback else settings.host
    port = _free_port(host, settings.port)
    return msgspec.structs.replace(
        settings,
        host=host,
        port=port,
        advertised_url=url_of(node if order.on_network else host, port),
        socket_dir=socket_dir,
    )


@contextmanager
def _socket_dir(key: str) -> Iterator[str]:
    """Give a folder for local sockets; remove those that killed lives of the replica have left."""
    prefix = f"prefixfleet-{key}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder


def _free_port(host: str, first: int) -> int:
    """Return a port that is free now; `first` when none is, for the replica to report it."""
    steps = range(first, 65536, PORT_STEP)
    return next((port for port in steps if is_free(host, port)), first)


def _tell(stream: IO[bytes], data: bytes) -> None:
    """Write to a process that may be gone already: then its exit code says all there is to say."""
    try:
        with stream:
            stream.write(data)
    except BrokenPipeError:
        return


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process, then end what it has left, which would keep its output open."""
    process.wait()
    asyncio.run(end_group(process.pid))


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield what is written as soon as it comes, until nobody can write any more."""
    with stream:
        while data := os.read(stream.fileno(), _CHUNK_BYTES):
            yield data


def _encoded(message: FromActor) -> bytes:
    return msgspec.msgpack.encode(message)

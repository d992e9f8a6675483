"""The seats of one gateway: its listeners, which outlive the processes that serve on them.

A process takes a seat, and the next one takes the same: a connection that was made in between waits
in the listener. It starts and watches no process.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

from kvindex.foundation.errors import DependencyError
from router.config import RouterConfig
from router.seat import Recording, Seat, socket_of

BACKLOG = 2048


class GatewaySeats:
    """`router.processes` seats on one port; seat 0 has the admin listener too.

    `folder`, which has to exist, takes a socket of each process.
    """

    def __init__(self, config: RouterConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._recording = Recording(key=secrets.token_bytes(32), started_at=time.monotonic())
        self._port = config.port
        self._listeners: list[socket.socket | None] = []
        self._admin: socket.socket | None = None

    def open(self) -> None:
        """Open the listeners; raise DependencyError when a port is taken."""
        config = self._config
        self._admin = listen(config.admin_host, config.admin_port, shared=False)
        # A port that may be shared is taken only by whoever finds it free first.
        listen(config.host, config.port, shared=False).close()
        first = listen(config.host, config.port, shared=True)
        self._port = first.getsockname()[1]
        self._listeners = [first]
        while len(self._listeners) < config.processes:
            self._listeners.append(listen(config.host, self._port, shared=True))

    def close(self) -> None:
        """Close the listeners, as far as they are this process's own. Idempotent."""
        if self._admin is not None:
            self._admin.close()
        for number in range(len(self._listeners)):
            self.give_up(number)

    def seat(self, number: int) -> Seat:
        """Return what a process needs to take a seat; a given up one is opened again.

        Raises DependencyError when that cannot be.
        """
        listener = self._listeners[number]
        if listener is None:
            listener = listen(self._config.host, self._port, shared=True)
            self._listeners[number] = listener
        return Seat(
            number=number,
            num_processes=self._config.processes,
            client_fd=listener.fileno(),
            admin_fd=self._admin.fileno() if self._admin is not None and number == 0 else None,
            folder=str(self._folder),
            recording=self._recording,
        )

    def socket_file(self, number: int) -> Path:
        """Where the process of a seat answers what an admin may ask."""
        return socket_of(self._folder, number)

    def give_up(self, number: int) -> None:
        """Let the other seats have the connections of one whose processes do not stay."""
        listener = self._listeners[number]
        if listener is not None:
            listener.close()
            self._listeners[number] = None


def fds_of(seat: Seat) -> tuple[int, ...]:
    """Return the open files that a process inherits with its seat."""
    return (seat.client_fd,) if seat.admin_fd is None else (seat.client_fd, seat.admin_fd)


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket that listens; `shared`: others may listen on the same port.

    Raises DependencyError when the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise port_taken(host, port, error) from None
    listener.setblocking(False)
    return listener


def port_taken(host: str, port: int, error: OSError) -> DependencyError:
    """Return what to raise when a listener cannot be opened."""
    return DependencyError(
        f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; stop what uses it, "
        "or choose another port"
    )

"""Which TCP ports are free, and who sits on one that is not.

A port found free may be taken before it is used: whoever binds it must still report the failure.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

from kvindex.foundation.errors import DependencyError


def is_free(host: str, port: int) -> bool:
    """Tell whether a listener could bind the port now."""
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        # As listeners do: a connection in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free(host: str, port: int, *, flag: str) -> None:
    """Raise DependencyError, with what to do, when the port is in use."""
    if not is_free(host, port):
        raise DependencyError(
            f"port {port} on {host} is in use; stop what listens there, or choose another with "
            f"{flag} (`{flag} 0` takes any free one)"
        )


def free_ports(host: str, first: int) -> Iterator[int]:
    """Yield free ports upwards from `first`.

    Ports of replicas are taken in sequence from below the range of outgoing connections, so that
    a connection to a dead replica cannot reach itself.
    """
    for port in range(first, 65536):
        if is_free(host, port):
            yield port
    raise DependencyError(f"no free port on {host} from {first} upwards; set worker.port lower")


def any_free_port(host: str) -> int:
    """Return a port that the system finds free."""
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

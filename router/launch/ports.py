"""Which TCP ports are free, and who sits on one that is not.

A port found free may be taken before it is used: whoever binds it must still report the failure.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing

from kvindex.foundation.errors import ConfigError, DependencyError


def is_free(host: str, port: int) -> bool:
    """Tell whether a listener could bind the port now."""
    try:
        _bound_port(host, port)
    except OSError:
        return False
    return True


def require_free(host: str, port: int, *, flag: str) -> None:
    """Raise DependencyError, with what to do, when the port cannot be had; ConfigError for a host.

    `flag` is the one that names the port.
    """
    try:
        _bound_port(host, port)
    except PermissionError:
        raise DependencyError(
            f"port {port} on {host} is not for this user; choose one from 1024 on with {flag}"
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _no_address(host, error) from None
        raise DependencyError(
            f"port {port} on {host} is in use; stop what listens there, or choose another with "
            f"{flag} (`{flag} 0` takes any free one)"
        ) from None


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
    """Return a port that the system finds free; ConfigError for a host that is not of here."""
    try:
        return _bound_port(host, 0)
    except OSError as error:
        raise _no_address(host, error) from None


def _bound_port(host: str, port: int) -> int:
    """Bind a port for a moment, 0 for any, and return it; OSError when it cannot be had."""
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        # As listeners do: a connection in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


def _no_address(host: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}: {error.strerror}; `host` must be an address of this machine"
    )

"""Short blocking HTTP calls of the command line and of health probes; standard library only.

It knows JSON bodies and bearer keys, and nothing of what the routes mean.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.foundation.tls import SYSTEM, Trust, why_untrusted

_PROBE_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 10.0
_TRUST_REMEDY = "name the authority behind it with --ca FILE or the variable SSL_CERT_FILE"


class Answer(NamedTuple):
    """Status and decoded JSON body; `body` is None when it is not JSON."""

    status: int
    body: Any


def answers_ok(url: str, *, trust: Trust = SYSTEM) -> bool:
    """Tell whether a GET is answered with 200; anything else, silence included, is no."""
    try:
        return call(url, timeout_s=_PROBE_TIMEOUT_S, trust=trust).status == 200
    except (DependencyError, ConfigError):
        return False


def socket_answers_ok(file: Path, path: str) -> bool:
    """Tell whether a GET over a Unix socket is answered with 200."""
    connection = _SocketConnection(file)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _SocketConnection(http.client.HTTPConnection):
    """HTTP to a server on this machine that listens on a file."""

    def __init__(self, file: Path) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT_S)
        self._file = file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._file))


def call(
    url: str,
    *,
    key: str | None = None,
    method: str = "GET",
    body: object = None,
    timeout_s: float = CALL_TIMEOUT_S,
    trust: Trust = SYSTEM,
) -> Answer:
    """Call a URL and return what came, whatever its status; DependencyError when nothing did.

    `body` is sent as JSON unless it is None. ConfigError when `trust` names no certificates.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    # A proxy of the environment has no business between processes of one fleet.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=trust.context()))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Answer(response.status, _decoded(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _decoded(error.read()))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        untrusted = why_untrusted(reason)
        if untrusted is not None:
            raise DependencyError(f"{url}: {untrusted}; {_TRUST_REMEDY}") from None
        raise DependencyError(f"{url} does not answer: {reason}") from None


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None

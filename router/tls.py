"""The certificate of a gateway's listeners: read, checked, and taken anew when it is renewed.

Both listeners show the same one; only that for clients may ask them for a certificate. A handshake
takes whichever is current, so a renewal needs no restart and no open connection notices. It knows
no HTTP; whom clients trust is in kvindex/foundation/tls.py.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.foundation.tls import trust_certificate
from router.config import TlsConfig

log = logging.getLogger("prefixfleet.router.tls")

WARN_BEFORE_DAYS = 14
_DAY_S = 24 * 3600


class Certificate(NamedTuple):
    """One that can be served: contexts of both listeners, its end in Unix seconds, its names."""

    clients: ssl.SSLContext
    admins: ssl.SSLContext
    expires_at: float
    names: tuple[str, ...]

    @property
    def days_left(self) -> float:
        """Until it ends, from now on; negative afterwards."""
        return (self.expires_at - time.time()) / _DAY_S

    def name_for(self, host: str) -> str:
        """Return the name to reach `host` by: itself if the certificate is for it."""
        return host if host in self.names else self.names[0].replace("*", "gateway")


class SwitchingContext:
    """A listener's context; each handshake goes on with the `current` one."""

    def __init__(self, current: ssl.SSLContext) -> None:
        self.current = current
        self.front = _server_context()
        # How much is asked of a client is settled before the first message, hence here.
        self.front.verify_mode = current.verify_mode
        self.front.sni_callback = self._switch  # called without a server name, too

    def _switch(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self.current


class ListenerTls:
    """The TLS of one gateway process. Raises DependencyError when there is nothing to serve."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._seen = self._stamps()
        self.certificate = load_certificate(config)
        self._clients = SwitchingContext(self.certificate.clients)
        self._admins = SwitchingContext(self.certificate.admins)
        self._following: asyncio.Task[None] | None = None
        self._warn()

    @property
    def file(self) -> str:
        """The file of the certificate."""
        return self._config.certificate

    def expires_at(self) -> float:
        """Return the end of what is served now, in Unix seconds."""
        return self.certificate.expires_at

    @property
    def clients(self) -> ssl.SSLContext:
        """For the listener of clients."""
        return self._clients.front

    @property
    def admins(self) -> ssl.SSLContext:
        """For the admin listener."""
        return self._admins.front

    def start(self, *, every_s: float) -> None:
        """Look for a renewed certificate from now on, until `close`."""
        self._following = asyncio.create_task(self._follow(every_s))

    def close(self) -> None:
        """Look no more."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Take what the files hold if they have changed; the old stays while it cannot be used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self.certificate = await asyncio.to_thread(load_certificate, self._config)
        except DependencyError as error:
            log.error("changed certificate refused, the old one stays: %s", error)
            return
        self._clients.current = self.certificate.clients
        self._admins.current = self.certificate.admins
        log.info("certificate renewed expires=%s", _day(self.certificate.expires_at))
        self._warn()

    def _warn(self) -> None:
        if self.certificate.days_left < WARN_BEFORE_DAYS:
            log.warning("certificate expires=%s; renew it", _day(self.certificate.expires_at))

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        files = (self._config.certificate, self._config.key, self._config.client_ca)
        return [_stamp(Path(file)) for file in files if file is not None]


def load_certificate(config: TlsConfig) -> Certificate:
    """Read and check everything; raise DependencyError naming setting, file and what is wrong."""
    try:
        trusting = trust_certificate(Path(config.certificate))
    except ConfigError as error:
        raise DependencyError(f"router.tls.certificate: {error}") from None
    clients, admins = _context(config), _context(config)
    try:
        shown = _shown_to(trusting, admins)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", error.reason)
        raise DependencyError(
            f"router.tls.certificate: {config.certificate}: {reason}; issue a new one"
        ) from None
    names = tuple(name for kind, name in shown.get("subjectAltName", ()) if kind != "DirName")
    if not names:
        raise DependencyError(
            f"router.tls.certificate: {config.certificate} is for no name, so clients refuse it; "
            "issue it with the gateway's host names as subject alternative names"
        )
    if config.client_ca is not None:
        _ask_clients(clients, config.client_ca)
    expires_at = ssl.cert_time_to_seconds(shown["notAfter"])
    return Certificate(clients, admins, float(expires_at), names)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _context(config: TlsConfig) -> ssl.SSLContext:
    """Return a context with the certificate, whose file is known to hold one."""
    context = _server_context()

    def refuse() -> str:
        raise DependencyError(
            f"router.tls.key: {config.key} is encrypted; a gateway that starts by itself needs it "
            "in clear, readable by its user alone"
        )

    try:
        Path(config.key).open("rb").close()
        context.load_cert_chain(config.certificate, config.key, refuse)
    except ssl.SSLError as error:
        raise DependencyError(_why_not_loaded(config, error.reason or "")) from None
    except OSError as error:
        raise DependencyError(f"router.tls.key: {config.key}: {error.strerror}") from None
    return context


def _why_not_loaded(config: TlsConfig, reason: str) -> str:
    """Put OpenSSL's reason into words; that the certificate can be read is known."""
    if reason == "KEY_VALUES_MISMATCH":
        return f"router.tls.key: {config.key} is not the key of {config.certificate}"
    if reason.endswith(("_TOO_SMALL", "_TOO_WEAK")):
        return f"router.tls.certificate: {config.certificate}: {reason.lower().replace('_', ' ')}"
    return f"router.tls.key: {config.key}: no private key in it; it must be PEM"


def _ask_clients(context: ssl.SSLContext, client_ca: str) -> None:
    """Serve only clients whose certificate is by one of these authorities."""
    try:
        context.load_verify_locations(cafile=client_ca)
    except ssl.SSLError:
        raise DependencyError(
            f"router.tls.client_ca: {client_ca}: no certificate in it; it must be PEM"
        ) from None
    except OSError as error:
        raise DependencyError(f"router.tls.client_ca: {client_ca}: {error.strerror}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _shown_to(client: ssl.SSLContext, server: ssl.SSLContext) -> Mapping[str, Any]:
    """Return the certificate that a client gets, by a handshake in memory.

    The standard library reads a certificate's dates and names only where one is verified; so a
    client does here, whose verdict is that of any other. Raises ssl.SSLError.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, serving, asking):
        with suppress(ssl.SSLWantReadError):  # It is the other side's turn.
            side.do_handshake()
    return asking.getpeercert() or {}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever a file does, None when it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))

"""Whom a client of ours trusts in TLS: the system's authorities, a file's, or one server alone.

It makes contexts of the standard library and knows neither HTTP nor who calls whom.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----[\x00-\x7f]+?-----END CERTIFICATE-----")


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Whose certificates are taken, by the paths of PEM files.

    `certificate` is the server's own, for clients on its machine: it alone is taken, whatever name
    it is for. Else `ca` holds the authorities. Without either they are the system's, or those of
    the variables SSL_CERT_FILE and SSL_CERT_DIR.
    """

    ca: str | None = None
    certificate: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; raise ConfigError for one that cannot be used."""
        if self.certificate is not None:
            return trust_certificate(Path(self.certificate))
        if self.ca is None:
            return ssl.create_default_context()
        try:
            return ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise ConfigError(f"{self.ca}: no certificate of an authority, as PEM") from None
        except OSError as error:
            raise ConfigError(f"{self.ca}: {error.strerror}; name an authority's file") from None


SYSTEM = Trust()


def trust_certificate(file: Path) -> ssl.SSLContext:
    """Trust the first certificate of a PEM file; raise ConfigError when there is none.

    What follows it there are authorities, which vouch for strangers as well.
    """
    try:
        found = _PEM.search(file.read_text(errors="replace"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if found is None:
        raise ConfigError(f"{file}: no certificate in it; it must be PEM")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # A certificate that is trusted itself needs no authority above it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=found[0])
    except ssl.SSLError:
        raise ConfigError(f"{file}: its certificate is damaged") from None
    return context


def why_untrusted(error: BaseException) -> str | None:
    """Return why a server's certificate was not taken, None when something else is wrong."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return None
    return f"its certificate is not trusted: {error.verify_message}"

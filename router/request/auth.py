"""From request headers to a key: whose it is, the tenant directory knows.

Both ways in which OpenAI-style clients send a key are read; nothing is compared here but the
admin key.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from engine.frontend.errors import RequestError

_SCHEME = "bearer"


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of the Authorization header, None without one.

    Raises RequestError `unauthorized` for a header of another scheme or without a key.
    """
    header = headers.get("Authorization")
    if header is None:
        return None
    scheme, _, key = header.partition(" ")
    if scheme.lower() != _SCHEME or not key.strip():
        raise RequestError(
            "unauthorized", "the Authorization header must read `Bearer` and an API key"
        )
    return key.strip()


def require_admin(headers: Mapping[str, str], admin_key: str) -> None:
    """Raise RequestError `unauthorized` unless the admin key was sent; constant time."""
    sent = (bearer_key(headers) or "").encode("utf-8", "surrogatepass")
    if not hmac.compare_digest(sent, admin_key.encode()):
        raise RequestError("unauthorized", "this needs the admin key of the fleet")

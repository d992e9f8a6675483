"""From request headers to a key: whose it is, the tenant directory knows."""

from __future__ import annotations

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

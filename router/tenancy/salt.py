"""The cache salt of a request: which tenants may find each other's cached prefixes.

A client can narrow its sharing, never widen it: without the fleet secret nobody can compute the
salt of another group. It knows no tenants and no requests.
"""

from __future__ import annotations

import base64
import functools
import hmac

from kvindex.hashing import canonical_cbor

_VERSION = 1


@functools.lru_cache(maxsize=4096)
def cache_salt(fleet_secret: bytes, group: str, client_salt: str | None) -> str:
    """Return base64url(HMAC-SHA256(secret, canonical CBOR [1, group, client salt or null])).

    The array form keeps group and client salt apart: no client salt can imitate another group.
    An empty `client_salt` is the caller's to refuse.
    """
    message = canonical_cbor((_VERSION, group, client_salt))
    digest = hmac.digest(fleet_secret, message, "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

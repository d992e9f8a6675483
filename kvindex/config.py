"""Settings of the index and of the stores behind it.

It knows no connections: kvindex/redis_connect.py opens what is written here.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

EMBEDDED = "embedded"
"""The value of a URL that asks for a server started and ended with the fleet."""
SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
"""How a URL may begin: one server, plain or with TLS, on a socket, sentinels, a cluster."""


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the two stores are, and how long a call to them may take.

    `index_url` holds what is rebuilt from snapshots; `state_url` holds what must persist, None
    when both are the same server. Each is "embedded" or a redis://, rediss:// or unix:// URL.
    """

    index_url: str = EMBEDDED
    state_url: str | None = None
    connect_timeout_s: float = 1.0
    call_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        for field in ("index_url", "state_url"):
            url = getattr(self, field)
            if url not in (None, EMBEDDED) and urlsplit(url).scheme not in SCHEMES:
                allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
                raise ValueError(f"{field} must be `{EMBEDDED}`, or begin with one of {allowed}")
        for field in ("connect_timeout_s", "call_timeout_s"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be above 0, not {getattr(self, field)}")

    @property
    def resolved_state_url(self) -> str:
        """The URL of the persistent store."""
        return self.index_url if self.state_url is None else self.state_url

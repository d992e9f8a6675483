"""What a replica says that a request really took."""

from __future__ import annotations

import msgspec


class RealisedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; `cached_tokens` None when the replica does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

"""The `prefixfleet` field that a gateway adds to an OpenAI body for a replica of ours.

A client may not send it: the gateway refuses it, and a replica obeys it only together with the
fleet's internal token.
"""

from __future__ import annotations

import msgspec


class FleetExtension(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the gateway has already decided about a request.

    `prompt_token_ids` replaces rendering and tokenizing in the replica. `seed` is set whenever the
    client gave none.
    """

    request_id: str
    cache_salt: str | None = None
    tenant: str | None = None
    weight: float = 1.0
    priority: int = 0
    seed: int | None = None
    prompt_token_ids: list[int] | None = None

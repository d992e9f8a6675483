"""The `prefixfleet` field that a gateway adds to an OpenAI body for a replica of ours.

A client may not send it: the gateway refuses it, and a replica obeys it only together with the
fleet's internal token.
"""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one choice is, in a chunk for the gateway: what a resume would have to repeat.

    `token_ids` are new since the choice's last chunk; `text_length` counts the characters of its
    text up to and including this chunk. `num_cached_tokens` of its prompt, once known.
    """

    choice: int
    token_ids: list[int]
    text_length: int
    num_cached_tokens: int | None = None


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice that another replica has begun, as far as its chunks have reached the gateway.

    A finished one is not computed any further; it only counts in the usage.
    """

    index: int
    token_ids: list[int]
    text_length: int
    num_cached_tokens: int = 0
    finished: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a replica takes over a generation; choices that are not listed begin anew.

    `created` is the instant that the answer's chunks have carried so far.
    """

    created: int
    choices: list[ResumedChoice]


class FleetExtension(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the gateway has already decided about a request.

    `prompt_token_ids` replaces rendering and tokenizing in the replica. `seed` is set whenever the
    client gave none. `dp_rank` is the engine core that should serve it, of a replica with several.
    With `return_token_ids` every chunk carries its `Progress`; `resume` goes on from such ones.
    """

    request_id: str
    cache_salt: str | None = None
    tenant: str | None = None
    weight: float = 1.0
    priority: int = 0
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    dp_rank: int | None = None
    return_token_ids: bool = False
    resume: Resume | None = None

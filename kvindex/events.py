"""KV events: vLLM's wire format, encoded as maps and decoded from maps or arrays.

A batch is msgpack `[ts, [event, ...], dp_rank]`. It knows no sockets and no index; unknown
fields and unknown event types are counted, never fatal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvindex.foundation.errors import WireError
from kvindex.hit_rule import GroupKind

WireHash = bytes | int
"""A block hash as it travels: the full digest, or vLLM's unsigned 64-bit integer."""

TIER_OF_MEDIUM = {"GPU": "gpu", "CPU": "host", "STORAGE": "disk"}
MEDIUM_OF_TIER = {tier: medium for medium, tier in TIER_OF_MEDIUM.items()}

RULE_OF_SPEC_KIND: dict[str, GroupKind] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "chunk",
    "mamba": "state",
}
"""vLLM's names of what the layers of a cache group read; others are unknown to the hit rule."""

SPEC_KIND_OF_RULE: dict[GroupKind, str] = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored", tag_field="type"):
    """A run of blocks is readable from now on.

    `token_ids` span the run from the first new to the last new block and may hold more than
    `len(block_hashes) * block_size` tokens (masked blocks); never zip the two blindly.
    `kv_cache_spec_kind` and `kv_cache_spec_sliding_window` (tokens) say what the layers of the
    group read. Our own events leave out all of these unless the engine is to announce tokens.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved", tag_field="type"):
    """No copy of these blocks is left on the medium."""

    block_hashes: list[WireHash]
    medium: str | None = "GPU"
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """Nothing is cached any more, on any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step changed, in order."""

    ts: float
    events: list[KVEvent]
    dp_rank: int | None = None


class DecodedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch from the wire and how much of it we did not understand."""

    batch: EventBatch
    num_unknown_fields: int = 0
    num_unknown_events: int = 0


_encoder = msgspec.msgpack.Encoder()
_raw_decoder = msgspec.msgpack.Decoder()
_CLASSES: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


def encode_batch(batch: EventBatch) -> bytes:
    """Serialise a batch; events become maps."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> DecodedBatch:
    """Parse a batch whose events are maps or arrays; raise WireError naming what is wrong."""
    try:
        raw = _raw_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"event batch: {error}") from None
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise WireError("event batch: expected [ts, events, dp_rank]")
    events: list[KVEvent] = []
    unknown_fields = max(0, len(raw) - 3)
    unknown_events = 0
    for position, item in enumerate(raw[1]):
        fields, unknown = _as_map(item, position)
        if fields is None:
            unknown_events += 1
            continue
        unknown_fields += unknown
        events.append(_convert(fields, position))
    ts, rank = raw[0], raw[2] if len(raw) > 2 else None
    if not isinstance(ts, (int, float)) or not isinstance(rank, (int, type(None))):
        raise WireError("event batch: ts must be a number and dp_rank an integer or nil")
    return DecodedBatch(
        batch=EventBatch(float(ts), events, rank),
        num_unknown_fields=unknown_fields,
        num_unknown_events=unknown_events,
    )


def _as_map(item: object, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return an event's known fields and the number of unknown ones; None for an unknown type."""
    if isinstance(item, dict):
        kind, given = item.get("type"), item
    elif isinstance(item, Sequence) and item and isinstance(item[0], str):
        kind = item[0]
        names = _CLASSES[kind].__struct_fields__ if kind in _CLASSES else ()
        given = dict(zip(names, item[1:], strict=False))
        given.update({f"extra{i}": None for i in range(len(item) - 1 - len(names))})
    else:
        raise WireError(f"event {position}: neither a map nor a tagged array")
    if not isinstance(kind, str) or kind not in _CLASSES:
        return None, 0
    known = _CLASSES[kind].__struct_fields__
    fields = {name: given[name] for name in known if name in given}
    fields["type"] = kind
    return fields, sum(1 for name in given if name != "type" and name not in known)


def _convert(fields: dict[str, Any], position: int) -> KVEvent:
    try:
        event: KVEvent = msgspec.convert(fields, KVEvent)
    except msgspec.ValidationError as error:
        raise WireError(f"event {position} ({fields['type']}): {error}") from None
    return event

"""Bailian (Qwen) usage traces: JSON lines with chat_id, parent_chat_id, turn and hash_ids.

Times are in seconds. Blocks have 16 tokens, and the partial last one has an id. The publisher
hashes each block by itself, so equal ids may stand after different prefixes: here an id is taken
together with all before it. A turn's session is the first turn of its conversation.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.traces.format import ChainIds, Described, Format, Stated, json_keys, require_agreement
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.source import TraceSource

BLOCK_SIZE = 16
_NO_PARENT = -1


class BailianRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as published; `timestamp` in seconds from the start of the trace."""

    chat_id: int
    parent_chat_id: int = _NO_PARENT
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


_ROW = msgspec.json.Decoder(BailianRow)


def _recognises(line: bytes) -> bool:
    return {"chat_id", "hash_ids"} <= json_keys(line)


def _describe(source: TraceSource, stated: Stated) -> Described:
    header = TraceHeader(block_size=BLOCK_SIZE, tail="ceil", time_unit="s")
    require_agreement(source, stated, header)
    return Described(header)


def _read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    ids = ChainIds()
    sessions: dict[int, int] = {}
    for number, line in source.lines():
        wire = source.decode(_ROW, number, line)
        has_parent = wire.parent_chat_id != _NO_PARENT
        # A parent from before the trace began still names the session.
        session = sessions.get(wire.parent_chat_id, wire.parent_chat_id)
        sessions[wire.chat_id] = session if has_parent else wire.chat_id
        yield TraceRow(
            line=number,
            arrival_s=wire.timestamp,
            input_length=wire.input_length,
            output_length=wire.output_length,
            hash_ids=ids.extend(None, wire.hash_ids),
            request_id=str(wire.chat_id),
            session_id=str(sessions[wire.chat_id]),
            parent_id=str(wire.parent_chat_id) if has_parent else None,
        )


BAILIAN = Format(
    name="bailian",
    recognises=_recognises,
    describe=_describe,
    read=_read,
)

"""Claude Code sessions as kv-cache-tester (WEKA) publishes them: one conversation per line.

A conversation holds requests and, nested at any depth, those of its subagents. Ids are usually
local to the conversation and are made global here. Times count from the start of the
conversation, and those of a subagent from its own start or, in some editions, also from the
conversation's: which one is told by whether any lies before the subagent's start. Conversations
have no common clock: each begins at 0 s, or at random times of a mean distance that the caller
states. The whole file is read before the first row comes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sim.traces.format import ChainIds, Described, Format, Stated, json_keys, require_agreement
from sim.traces.row import HashScope, TraceHeader, TraceRow
from sim.traces.source import TraceSource

_SUBAGENT = "subagent"
_NO_CLOCK = "conversations have no common clock: each begins at 0 s; --session-gap S spreads them"
_START_SEED = 0


class WekaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or a subagent with its own list of them; `t` and `think_time` in seconds."""

    t: float
    type: str
    model: str | None = None
    num_input: int | None = msgspec.field(name="in", default=None)
    num_output: int | None = msgspec.field(name="out", default=None)
    hash_ids: tuple[int, ...] = ()
    think_time: float | None = None
    agent_id: str | None = None
    requests: tuple[WekaEntry, ...] = ()


class WekaConversation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file."""

    id: str
    block_size: int
    hash_id_scope: HashScope = "local"
    requests: tuple[WekaEntry, ...]


_CONVERSATION = msgspec.json.Decoder(WekaConversation)


@dataclass(frozen=True, slots=True)
class _Thread:
    """A conversation or a subagent of it: whose requests follow one another."""

    session_id: str
    entries: tuple[WekaEntry, ...]
    start_s: float


def _recognises(line: bytes) -> bool:
    return {"id", "block_size", "requests"} <= json_keys(line)


def _describe(source: TraceSource, stated: Stated) -> Described:
    number, line = source.first_line()
    first = source.decode(_CONVERSATION, number, line)
    header = TraceHeader(
        block_size=first.block_size,
        hash_scope=first.hash_id_scope,
        tail=stated.tail or "floor",
        lengths=stated.lengths or "exact",
        time_unit="s",
    )
    require_agreement(source, stated, header)
    if (gap_s := stated.session_gap_s) is None:
        return Described(header, (_NO_CLOCK,))
    return Described(
        header, (f"conversations begin at invented times, {gap_s:g} s apart in the mean (Poisson)",)
    )


def _read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    conversations = [
        (number, source.decode(_CONVERSATION, number, line)) for number, line in source.lines()
    ]
    for number, conversation in conversations:
        _require_same(source, number, conversation, header)
    own_clocks = any(_has_own_clock(entry) for _, one in conversations for entry in one.requests)
    starts_s = _starts(stated.session_gap_s)
    rows = [
        (_later(row, start_s), conversation.id)
        for (number, conversation), start_s in zip(conversations, starts_s, strict=False)
        for thread in _threads(conversation, own_clocks=own_clocks)
        for row in _thread_rows(source, number, thread)
    ]
    # Stable, so that equal times keep the order of the file and ids are numbered alike each time.
    rows.sort(key=lambda row: row[0].arrival_s)
    ids = ChainIds()
    for row, conversation_id in rows:
        scope = conversation_id if header.hash_scope == "local" else None
        yield msgspec.structs.replace(row, hash_ids=ids.extend(scope, row.hash_ids or ()))


def _starts(gap_s: float | None) -> Iterator[float]:
    """Yield when conversations begin: the first at 0 s, the others by a Poisson process."""
    rng, start_s = random.Random(_START_SEED), 0.0
    while True:
        yield start_s
        start_s += 0.0 if gap_s is None else rng.expovariate(1 / gap_s)


def _later(row: TraceRow, by_s: float) -> TraceRow:
    return msgspec.structs.replace(row, arrival_s=row.arrival_s + by_s)


def _require_same(
    source: TraceSource, line: int, conversation: WekaConversation, header: TraceHeader
) -> None:
    for field, expected in (
        ("block_size", header.block_size),
        ("hash_id_scope", header.hash_scope),
    ):
        if (value := getattr(conversation, field)) != expected:
            raise source.error(line, f"{field} is {value}, in the first conversation {expected}")


def _has_own_clock(entry: WekaEntry) -> bool:
    """Say whether requests of a subagent lie before its start."""
    return any(inner.t < entry.t or _has_own_clock(inner) for inner in entry.requests)


def _threads(conversation: WekaConversation, *, own_clocks: bool) -> Iterator[_Thread]:
    """Yield the conversation itself and every subagent in it, however deep."""
    waiting = [_Thread(conversation.id, conversation.requests, 0.0)]
    while waiting:
        thread = waiting.pop()
        yield thread
        for index, entry in enumerate(thread.entries):
            if entry.type == _SUBAGENT:
                name = f"{thread.session_id}/{entry.agent_id or index}"
                start_s = thread.start_s + entry.t if own_clocks else 0.0
                waiting.append(_Thread(name, entry.requests, start_s))


def _thread_rows(source: TraceSource, line: int, thread: _Thread) -> Iterator[TraceRow]:
    """Yield the requests of one thread, each the child of the one before; ids as in the file."""
    previous: str | None = None
    for index, entry in enumerate(thread.entries):
        if entry.type == _SUBAGENT:
            continue
        request_id = f"{thread.session_id}#{index}"
        if entry.num_input is None or entry.num_output is None:
            raise source.error(line, f"request {request_id} has no 'in' or no 'out' length")
        yield TraceRow(
            line=line,
            arrival_s=thread.start_s + entry.t,
            input_length=entry.num_input,
            output_length=entry.num_output,
            hash_ids=entry.hash_ids,
            request_id=request_id,
            session_id=thread.session_id,
            parent_id=previous,
            delay_s=None if previous is None else entry.think_time,
            model=entry.model,
        )
        previous = request_id


WEKA = Format(
    name="weka",
    recognises=_recognises,
    describe=_describe,
    read=_read,
)

"""JSON lines with token ids: plain ones, and LLMServingSim's, flat or with `sub_requests`.

Hash ids are computed here from the tokens, for the block size that the caller states. The turns
of `sub_requests` have no times of their own: each is put one tool call after the one before, which
is the earliest it can be, and says so in `delay_s`. All rows are read before the first comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.traces.format import Described, Format, Stated, json_keys, require_block_size
from sim.traces.row import NUM_MS_PER_S, TraceHeader, TraceRow
from sim.traces.source import TraceSource
from sim.traces.token_blocks import TokenBlocks

_NS_PER_S = 1_000_000_000
_PROMPT_FIELDS = ("token_ids", "prompt_token_ids", "input_token_ids", "input_tok_ids")


class TokenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what is known of its output."""

    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    input_token_ids: tuple[int, ...] | None = None
    input_tok_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None
    output_tok_ids: tuple[int, ...] | None = None
    output_length: int | None = None
    output_toks: int | None = None
    tool_duration_ns: int = 0

    def prompt(self) -> tuple[int, ...] | None:
        """Return the prompt under whichever name it has."""
        given = (getattr(self, name) for name in _PROMPT_FIELDS)
        return next((tokens for tokens in given if tokens is not None), None)

    def output(self) -> tuple[int, ...] | None:
        """Return the output's tokens, None when there is only a length."""
        return self.output_token_ids if self.output_tok_ids is None else self.output_tok_ids

    def num_output(self) -> int | None:
        """Return the output's length, None when nothing tells it."""
        if (tokens := self.output()) is not None:
            return len(tokens)
        return self.output_toks if self.output_length is None else self.output_length


class TokenRow(TokenTurn, frozen=True, kw_only=True):
    """A line: one turn, or a session of them; `timestamp` in milliseconds."""

    timestamp: float | None = None
    arrival_time_ns: int | None = None
    session_id: str | int | None = None
    request_id: str | int | None = None
    tenant: str | None = None
    model: str | None = None
    sub_requests: tuple[TokenTurn, ...] | None = None

    def arrival_s(self) -> float | None:
        """Return the time of arrival, None when the line has none."""
        if self.arrival_time_ns is not None:
            return self.arrival_time_ns / _NS_PER_S
        return None if self.timestamp is None else self.timestamp / NUM_MS_PER_S


_ROW = msgspec.json.Decoder(TokenRow)


def _recognises(line: bytes) -> bool:
    return bool(json_keys(line) & {*_PROMPT_FIELDS, "sub_requests"})


def _describe(source: TraceSource, stated: Stated) -> Described:
    size = require_block_size(source, stated, why="token ids may be cut into blocks of any size")
    return Described(TraceHeader(block_size=size, tail="floor", time_unit="s"))


def _read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    turns = [
        turn
        for number, line in source.lines()
        for turn in _turns(source, number, source.decode(_ROW, number, line))
    ]
    turns.sort(key=lambda turn: turn[0].arrival_s)
    blocks = TokenBlocks(header.block_size or 1)
    for row, prompt, output in turns:
        try:
            ids, output_ids = blocks.ids(prompt, output, model=row.model)
        except ValueError as error:
            raise source.error(row.line, str(error)) from None
        yield msgspec.structs.replace(row, hash_ids=ids, output_hash_ids=output_ids)


_Turn = tuple[TraceRow, tuple[int, ...], tuple[int, ...] | None]


def _turns(source: TraceSource, line: int, wire: TokenRow) -> Iterator[_Turn]:
    """Yield the turns of a line with their prompts and outputs; hash_ids are still missing."""
    arrival_s = wire.arrival_s()
    if arrival_s is None:
        raise source.error(line, "no time: the row needs timestamp (ms) or arrival_time_ns")
    first = TraceRow(
        line=line,
        arrival_s=arrival_s,
        input_length=0,
        output_length=0,
        request_id=_text(wire.request_id),
        session_id=_text(wire.session_id),
        tenant=wire.tenant,
        model=wire.model,
    )
    if wire.sub_requests is None:
        yield _measured(source, wire, first)
    else:
        yield from _session_turns(source, wire.sub_requests, first)


def _session_turns(
    source: TraceSource, turns: tuple[TokenTurn, ...], first: TraceRow
) -> Iterator[_Turn]:
    """Yield turns that follow one another, each after the tool call of the one before."""
    session_id = first.session_id or f"line-{first.line}"
    row = msgspec.structs.replace(first, session_id=session_id)
    for index, turn in enumerate(turns):
        row = msgspec.structs.replace(row, request_id=f"{session_id}#{index}")
        yield _measured(source, turn, row)
        delay_s = turn.tool_duration_ns / _NS_PER_S
        row = msgspec.structs.replace(
            row, parent_id=row.request_id, delay_s=delay_s, arrival_s=row.arrival_s + delay_s
        )


def _measured(source: TraceSource, turn: TokenTurn, row: TraceRow) -> _Turn:
    """Add a turn's lengths to its row."""
    prompt, num_output = turn.prompt(), turn.num_output()
    if prompt is None:
        raise source.error(row.line, f"no prompt: the row needs one of {', '.join(_PROMPT_FIELDS)}")
    if num_output is None:
        raise source.error(row.line, "no output: the row needs output_length or output_token_ids")
    measured = msgspec.structs.replace(row, input_length=len(prompt), output_length=num_output)
    return measured, prompt, turn.output()


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)


TOKENS = Format(
    name="tokens",
    recognises=_recognises,
    describe=_describe,
    read=_read,
)

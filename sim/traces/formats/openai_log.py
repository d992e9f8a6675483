"""A log of OpenAI request bodies: JSON lines with `body`, and when it arrived.

Prompts are rendered and tokenized by the code that the gateway uses, so the caller passes a
model's tokenizer. Only the prompt of a body is read; its other fields change no block. OpenAI's
batch files (custom_id, url, body) are of this form; they have no times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from sim.traces.errors import TraceError
from sim.traces.format import Described, Format, LogClock, Stated, json_keys, require_block_size
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.source import TraceSource
from sim.traces.token_blocks import TokenBlocks

if TYPE_CHECKING:
    from engine.frontend.prompt import PromptEncoder


class LoggedUsage(msgspec.Struct, frozen=True):
    """The part of an answer's usage that a trace needs."""

    completion_tokens: int


class LoggedBody(msgspec.Struct, frozen=True):
    """The part of a request that makes its prompt, and what bounds its output."""

    model: str = ""
    messages: list[ChatMessage] | None = None
    tools: list[msgspec.Raw] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A line; `timestamp` in seconds, of any epoch."""

    body: LoggedBody
    timestamp: float | None = None
    usage: LoggedUsage | None = None
    output_length: int | None = None
    request_id: str | None = None
    custom_id: str | None = None
    session_id: str | None = None
    tenant: str | None = None


_LINE = msgspec.json.Decoder(LoggedRequest)
_OUTPUT_NOTE = "where an answer's length is not logged, max_tokens stands for it, else 0"


def _recognises(line: bytes) -> bool:
    return "body" in json_keys(line)


def _describe(source: TraceSource, stated: Stated) -> Described:
    size = require_block_size(source, stated, why="text may be cut into blocks of any size")
    _prompts(source, stated)
    notes = [_OUTPUT_NOTE]
    number, line = source.first_line()
    if source.decode(_LINE, number, line).timestamp is None:
        notes.append(LogClock.NO_TIMES)
    return Described(TraceHeader(block_size=size, tail="floor", time_unit="s"), tuple(notes))


def _prompts(source: TraceSource, stated: Stated) -> PromptEncoder:
    if stated.prompts is None:
        raise TraceError(
            source.path, "request bodies hold text: pass a model's tokenizer, --tokenizer FOLDER"
        )
    return stated.prompts


def _read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    prompts = _prompts(source, stated)
    blocks = TokenBlocks(header.block_size or 1)
    clock = LogClock(source)
    for number, line in source.lines():
        wire = source.decode(_LINE, number, line)
        arrival_s = clock.arrival_s(number, wire.timestamp)
        for tokens in _tokenize(source, number, wire.body, prompts):
            ids, _ = blocks.ids(tokens, None, model=wire.body.model)
            yield TraceRow(
                line=number,
                arrival_s=arrival_s,
                input_length=len(tokens),
                output_length=_output_length(wire),
                hash_ids=ids,
                request_id=wire.request_id or wire.custom_id,
                session_id=wire.session_id or wire.body.prompt_cache_key,
                tenant=wire.tenant or wire.body.user,
                model=wire.body.model or None,
            )


def tokenize(body: LoggedBody, prompts: PromptEncoder) -> list[list[int]]:
    """Return the token ids of each prompt of a body; RequestError when we cannot tell."""
    if body.tools:
        raise RequestError("invalid_request", "tools are part of a prompt that we cannot render")
    if body.messages is not None:
        chat = ChatCompletionRequest(model=body.model, messages=body.messages)
        return [prompts.chat(chat)]
    if body.prompt is not None:
        return prompts.completion(CompletionRequest(model=body.model, prompt=body.prompt))
    raise RequestError("invalid_request", "the body has neither messages nor prompt")


def _tokenize(
    source: TraceSource, line: int, body: LoggedBody, prompts: PromptEncoder
) -> list[list[int]]:
    try:
        return tokenize(body, prompts)
    except RequestError as error:
        raise source.error(line, str(error)) from None


def _output_length(wire: LoggedRequest) -> int:
    if wire.output_length is not None:
        return wire.output_length
    if wire.usage is not None:
        return wire.usage.completion_tokens
    return wire.body.max_completion_tokens or wire.body.max_tokens or 0


OPENAI_LOG = Format(
    name="openai",
    recognises=_recognises,
    describe=_describe,
    read=_read,
)

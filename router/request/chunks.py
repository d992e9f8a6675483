"""What the gateway needs to know of one chunk of a stream, and how a chunk is made presentable.

It reads the few fields that steer the relay and leaves everything else as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.extension import Progress
from router.request.usage import RealisedUsage


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: dict[str, msgspec.Raw] | None = None
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """A chunk as far as it matters to the relay; also reads an answer that is not streamed."""

    choices: list[_Choice] = []
    usage: _Usage | UnsetType | None = UNSET
    error: msgspec.Raw | UnsetType = UNSET  # With None, msgspec takes null alone.
    created: int | None = None
    prefixfleet: Progress | UnsetType = UNSET

    @property
    def has_output(self) -> bool:
        """Whether it carries anything that was generated; a role alone is no output."""
        choices = self.choices
        return _has_output(choices[0]) if len(choices) == 1 else any(map(_has_output, choices))

    @property
    def realised(self) -> RealisedUsage | None:
        """The usage it states, if any."""
        usage = self.usage
        if usage is UNSET or usage is None:
            return None
        details = usage.prompt_tokens_details
        return RealisedUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or 0,
            cached_tokens=details.cached_tokens if details is not None else None,
        )


def _has_output(choice: _Choice) -> bool:
    if choice.finish_reason or choice.text:
        return True
    for name, value in (choice.delta or {}).items():
        if name != "role" and bytes(value) not in _EMPTY:  # Raw equals nothing but itself
            return True
    return False


_EMPTY = (b'""', b"null", b"[]")
_decoder = msgspec.json.Decoder(Chunk)
_several_decoder = msgspec.json.Decoder(list[Chunk])
_encoder = msgspec.json.Encoder()
_PROGRESS = b',"prefixfleet":'
_NO_USAGE = b',"usage":null}'


def read_chunk(data: bytes) -> Chunk:
    """Read a chunk; raises msgspec.DecodeError when it is none."""
    return _decoder.decode(data)


def read_chunks(several: Sequence[bytes]) -> list[Chunk]:
    """Read chunks that came together; raises msgspec.DecodeError when one of them is none."""
    if len(several) == 1:
        return [_decoder.decode(several[0])]
    return _several_decoder.decode(b"[" + b",".join(several) + b"]")


def presentable(data: bytes, chunk: Chunk, *, include_usage: bool) -> bytes | None:
    """Return the chunk as the client may see it, None when it is not meant for the client.

    Usage was asked for by the gateway, so it is taken out again unless the client wants it; the
    `prefixfleet` field never leaves the fleet.
    """
    if not include_usage and chunk.usage and not chunk.choices:
        return None
    if chunk.prefixfleet is not UNSET:
        return _without_progress(data, chunk, include_usage=include_usage)
    if chunk.usage is UNSET or include_usage:
        return data
    return _without(data, "usage")


def _without_progress(data: bytes, chunk: Chunk, *, include_usage: bool) -> bytes:
    """Cut off what replicas of ours add, without decoding the chunk.

    They write it last, and in JSON a quotation mark within a string is escaped, so that what is
    found is a field.
    """
    end = data.rfind(_PROGRESS)
    if end < 0:
        data = _without(data, "prefixfleet")
        return data if include_usage or chunk.usage is UNSET else _without(data, "usage")
    shown = data[:end] + b"}"
    if include_usage or chunk.usage is UNSET:
        return shown
    if shown.endswith(_NO_USAGE):
        return shown[: -len(_NO_USAGE)] + b"}"
    return _without(shown, "usage")


def _without(data: bytes, name: str) -> bytes:
    fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    fields.pop(name, None)
    return _encoder.encode(fields)

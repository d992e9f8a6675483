"""What the gateway needs to know of one chunk of a stream, and how a chunk is made presentable.

It reads the few fields that steer the relay and leaves everything else as it came.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.request.job import RealisedUsage


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
    error: msgspec.Raw | None = None
    prefixfleet: msgspec.Raw | UnsetType = UNSET

    @property
    def has_output(self) -> bool:
        """Whether it carries anything that was generated; a role alone is no output."""
        return any(_has_output(choice) for choice in self.choices)

    @property
    def is_usage_only(self) -> bool:
        """Whether it is the closing chunk that only `include_usage` asks for."""
        return not self.choices and bool(self.usage)

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
    return bool(choice.finish_reason or choice.text) or any(
        name != "role" and value not in (b'""', b"null", b"[]")
        for name, value in (choice.delta or {}).items()
    )


_decoder = msgspec.json.Decoder(Chunk)
_encoder = msgspec.json.Encoder()


def read_chunk(data: bytes) -> Chunk:
    """Read a chunk; raises msgspec.DecodeError when it is none."""
    return _decoder.decode(data)


def presentable(data: bytes, chunk: Chunk, *, include_usage: bool) -> bytes | None:
    """Return the chunk as the client may see it, None when it is not meant for the client.

    Usage was asked for by the gateway, so it is taken out again unless the client wants it; the
    `prefixfleet` field never leaves the fleet. Most chunks pass untouched.
    """
    if chunk.is_usage_only and not include_usage:
        return None
    strip_usage = chunk.usage is not UNSET and not include_usage
    if not strip_usage and chunk.prefixfleet is UNSET:
        return data
    fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    fields.pop("prefixfleet", None)
    if strip_usage:
        fields.pop("usage", None)
    return _encoder.encode(fields)

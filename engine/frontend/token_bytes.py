"""The bytes that single tokens stand for, read from how the tokenizer writes its vocabulary.

Half a character has no text of its own, but it has bytes. Byte-level (GPT-2), SentencePiece with
byte fallback, and plain vocabularies are told apart by the tokenizer's decoder.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.frontend.added_token import AddedToken

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class _Layout(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that matter here."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


class TokenBytes:
    """Turns tokens, as the vocabulary writes them, into bytes."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Read the layout; raises msgspec.DecodeError when it is no tokenizer.json."""
        layout = msgspec.json.decode(tokenizer_json, type=_Layout)
        self._added = {token.id: token.content.encode() for token in layout.added_tokens}
        names = set(_decoder_names(layout.decoder))
        self._is_byte_level = "ByteLevel" in names
        self._has_fallback = "ByteFallback" in names
        self._has_spaces = bool(names & {"Metaspace", "Replace"})

    def of(self, token_id: int, written: str | None) -> bytes:
        """Return the bytes of a token that the vocabulary writes so; None: it is no token."""
        if token_id in self._added:
            return self._added[token_id]
        if written is None:
            return b""
        if self._is_byte_level:
            if all(character in _BYTE_OF for character in written):
                return bytes(_BYTE_OF[character] for character in written)
            return written.encode()
        byte = _BYTE.fullmatch(written) if self._has_fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        return (written.replace(_SPACE, " ") if self._has_spaces else written).encode()


def _decoder_names(decoder: dict[str, Any] | None) -> list[str]:
    """List the types in a decoder, which may be a sequence of others."""
    if decoder is None:
        return []
    inner = decoder.get("decoders") or []
    return [str(decoder.get("type")), *(name for each in inner for name in _decoder_names(each))]


def _byte_of() -> dict[str, int]:
    """Return GPT-2's character of every byte, the other way round.

    Printable bytes stand for themselves, the others for the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_of()

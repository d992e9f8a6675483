"""The bytes of single tokens, whatever way a tokenizer writes its vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.frontend.encoder import Encoder
from engine.frontend.token_bytes import TokenBytes
from tests.engine.frontend.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_bundle


def token_bytes(decoder: dict[str, Any] | None, *added: tuple[int, str]) -> TokenBytes:
    tokens = [{"id": i, "content": content, "special": True} for i, content in added]
    return TokenBytes(json.dumps({"decoder": decoder, "added_tokens": tokens}).encode())


BYTE_LEVEL = {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}
SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.mark.parametrize(
    ("decoder", "written", "expected"),
    [
        (BYTE_LEVEL, "Ġthe", b" the"),
        (BYTE_LEVEL, "Ġä", b" \xe4"),
        (BYTE_LEVEL, "ĊĊ", b"\n\n"),
        (BYTE_LEVEL, "中", "中".encode()),
        (SENTENCEPIECE, "▁the", b" the"),
        (SENTENCEPIECE, "<0xE4>", b"\xe4"),
        (SENTENCEPIECE, "中", "中".encode()),
        ({"type": "Metaspace"}, "▁a", b" a"),
        ({"type": "Metaspace"}, "<0xE4>", b"<0xE4>"),
        (None, "Ġthe", "Ġthe".encode()),
    ],
)
def test_a_token_stands_for_its_bytes(
    decoder: dict[str, Any] | None, written: str, expected: bytes
) -> None:
    assert token_bytes(decoder).of(5, written) == expected


def test_an_added_token_is_its_text_and_an_unknown_one_is_nothing() -> None:
    known = token_bytes(BYTE_LEVEL, (7, "<|ende Ġ|>"))
    assert known.of(7, "<|ende Ġ|>") == "<|ende Ġ|>".encode()
    assert known.of(8, None) == b""


def test_an_encoder_knows_the_bytes_of_every_token() -> None:
    encoder = Encoder(tiny_bundle())
    assert [encoder.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert encoder.token_bytes(IM_END_ID) == b"<|im_end|>"
    assert encoder.token_bytes(VOCAB_SIZE) == b""
    text = "the 中文 é\n"
    tokens = encoder.encode(text, add_special_tokens=False)
    assert b"".join(map(encoder.token_bytes, tokens)).decode() == text

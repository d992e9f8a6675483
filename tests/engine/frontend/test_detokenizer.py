"""Text from token ids, one at a time: right at the borders of characters, for any bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.frontend.detokenizer import Detokenizer
from engine.frontend.encoder import Encoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from tests.engine.frontend.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_bundle

BYTE_LEVEL = Encoder(tiny_bundle())
LETTERS = "abcdeknrstx"


def byte_fallback_encoder() -> Encoder:
    """A tokenizer of the SentencePiece kind: words with a space mark, bytes as <0x00> tokens."""
    words = ["▁the", "▁on", "lo", "rem", "▁", *LETTERS]
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    config = json.dumps({"vocab_size": len(names)}).encode()
    return Encoder(
        TokenizerBundle({"tokenizer.json": tokenizer.to_str().encode(), "config.json": config})
    )


BYTE_FALLBACK = byte_fallback_encoder()
FIRST_BYTE, FIRST_WORD = 2, 258
THE, ON, LO, REM, SPACE = range(FIRST_WORD, FIRST_WORD + 5)


def pieces(encoder: Encoder, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(encoder, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def byte_ids(encoder: Encoder, data: bytes) -> list[int]:
    """Token ids of bytes, one each; letters are pieces of their own where the tokenizer has any."""
    if encoder is BYTE_LEVEL:
        return list(data)
    first_letter = SPACE + 1
    return [
        first_letter + LETTERS.index(chr(byte)) if chr(byte) in LETTERS else FIRST_BYTE + byte
        for byte in data
    ]


ENCODERS = pytest.mark.parametrize("encoder", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "pieces"])


@ENCODERS
def test_a_character_comes_out_when_its_last_byte_is_there(encoder: Encoder) -> None:
    ids = byte_ids(encoder, "é中😀".encode())
    assert pieces(encoder, ids) == ["", "é", "", "", "中", "", "", "", "😀", ""]


@ENCODERS
def test_an_unfinished_character_is_replaced_at_the_end(encoder: Encoder) -> None:
    ids = byte_ids(encoder, "a中".encode()[:-1])
    assert "".join(pieces(encoder, ids)) == encoder.decode(ids)
    assert encoder.decode(ids).rstrip("\ufffd") == "a"


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_any_text_add_up_to_it(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
@settings(max_examples=60, deadline=None)
def test_random_tokens_never_raise_and_decode_as_a_whole_does(ids: list[int]) -> None:
    text = "".join(pieces(BYTE_LEVEL, ids))
    # Runs of a dozen bytes and more that are no UTF-8 may be cut into other replacements.
    assert text.replace("\ufffd", "") == BYTE_LEVEL.decode(ids).replace("\ufffd", "")


@pytest.mark.fault("engine-9")
@given(st.lists(st.integers(0, FIRST_WORD + 15), max_size=60))
@settings(max_examples=60, deadline=None)
def test_random_pieces_never_raise(ids: list[int]) -> None:
    pieces(BYTE_FALLBACK, ids)


@pytest.mark.fault("engine-9")
def test_bytes_that_spoil_the_text_before_them_do_not_take_it_back() -> None:
    # A decoder of this kind reads the four bytes as one invalid run: 中 is no longer in its text.
    ids = [*byte_ids(BYTE_FALLBACK, "中".encode()), FIRST_BYTE + 0xE4, LO]
    assert BYTE_FALLBACK.decode(ids) == "\ufffd\ufffd\ufffd\ufffdlo"
    assert pieces(BYTE_FALLBACK, ids) == ["", "", "中", "", "\ufffdlo", ""]


@ENCODERS
@pytest.mark.fault("engine-9")
def test_an_endless_run_of_invalid_bytes_comes_out_and_is_forgotten(encoder: Encoder) -> None:
    ids = byte_ids(encoder, b"\xff" * 60 + b"end")
    emitted = pieces(encoder, ids)
    assert emitted[:12] == [""] * 11 + ["\ufffd" * 12]
    assert "".join(emitted) == "\ufffd" * 60 + "end"


@ENCODERS
@pytest.mark.fault("engine-8")
def test_a_prompt_that_ends_mid_character_does_not_leak(encoder: Encoder) -> None:
    prompt = byte_ids(encoder, "secret 中".encode()[:-1])
    last_byte = byte_ids(encoder, "中".encode()[-1:])
    following = byte_ids(encoder, b"ab")
    assert pieces(encoder, last_byte + following, prompt) == ["中", "a", "b", ""]
    assert pieces(encoder, following, prompt) == ["a", "b", ""]


@ENCODERS
@pytest.mark.fault("engine-8")
@pytest.mark.parametrize("cut", range(26))
def test_no_prompt_leaks_wherever_it_is_cut(encoder: Encoder, cut: int) -> None:
    whole = "x中😀é中文文文"
    prompt, rest = whole.encode()[:cut], whole.encode()[cut:]
    text = "".join(pieces(encoder, byte_ids(encoder, rest), byte_ids(encoder, prompt)))
    assert text == whole[len(prompt.decode("utf-8", "ignore")) :]


@pytest.mark.fault("engine-8")
def test_a_token_of_whole_characters_and_half_a_one_gives_only_what_is_new() -> None:
    space_and_byte, *rest = BYTE_LEVEL.encode(" 中", add_special_tokens=False)
    assert len(rest) == 2
    assert pieces(BYTE_LEVEL, rest, [*b"secret", space_and_byte]) == ["", "中", ""]
    assert pieces(BYTE_LEVEL, [*b"a"], [*b"secret", space_and_byte]) == ["a", ""]


@ENCODERS
@pytest.mark.fault("engine-8")
def test_a_prompt_that_is_no_text_at_all_does_not_leak_either(encoder: Encoder) -> None:
    prompt = byte_ids(encoder, b"secret" + b"\xff\xfe" * 10)
    assert pieces(encoder, byte_ids(encoder, "a中".encode()), prompt) == ["a", "", "", "中", ""]


@ENCODERS
def test_a_replacement_character_in_the_prompt_is_the_prompts(encoder: Encoder) -> None:
    prompt = byte_ids(encoder, "a\ufffd".encode())
    assert pieces(encoder, byte_ids(encoder, b"b"), prompt) == ["b", ""]


def test_a_word_keeps_the_space_that_it_has_after_the_prompt() -> None:
    assert pieces(BYTE_FALLBACK, [THE, LO, REM, ON], [ON]) == [" the", "lo", "rem", " on", ""]
    assert pieces(BYTE_FALLBACK, [THE, ON]) == ["the", " on", ""]


def test_special_tokens_have_no_text_and_unknown_ids_neither() -> None:
    t = byte_ids(BYTE_LEVEL, b"t")
    assert pieces(BYTE_LEVEL, [*t, IM_END_ID, 10_000, *t]) == ["t", "", "", "t", ""]

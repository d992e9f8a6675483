"""Words that are looked up give exactly the ids of encoding a text as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.frontend.encoder import Encoder
from engine.frontend.segments import TooMuchToEncodeError
from engine.frontend.words import MAX_CHARS, WordTable, word_table
from tests.engine.frontend.tiny_tokenizer import MERGED, byte_alphabet, tiny_bundle

START, END = "<|im_start|>", "<|im_end|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "o"), ("1", "2"), ("Ġ", "Ġ")]


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


WAYS_TO_CUT = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt-2, digits apart": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama 3": split_by(LLAMA3),
    "qwen 2": split_by(LLAMA3.replace("{1,3}", "")),
}


def tokenizer_with(way: pre_tokenizers.PreTokenizer, added: Sequence[AddedToken] = ()) -> Tokenizer:
    names = dict.fromkeys([*byte_alphabet(), *MERGED, "12", "ĠĠ"])
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = way
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (START, END, "<|im")])
    tokenizer.add_special_tokens(list(added))
    return tokenizer


class Counted:
    """A table over a tokenizer, noting what the tokenizer still has to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoded: list[str] = []
        table = word_table(tokenizer.to_str().encode(), self._encode)
        assert table is not None
        self.table: WordTable = table

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += texts
        return [self.whole(text) for text in texts]

    def whole(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


PIECES = st.sampled_from(
    (START, END, "<|im", "|>", "the", " the", "The", "'s", "'S", "'", " '", "lo", "12", " 1", "3")
)
GAPS = st.sampled_from(
    ("\n", "\r\n", " \n", "  ", "\t", "\x0b", "\x1c", "\x00", "!", " $", "<", "é", "中")
)
TEXTS = st.one_of(
    st.lists(PIECES | GAPS, max_size=24).map("".join), st.text(st.characters(max_codepoint=127))
)


@pytest.mark.parametrize("way", WAYS_TO_CUT)
def test_ids_equal_those_of_a_full_encoding(way: str) -> None:
    counted = Counted(tokenizer_with(WAYS_TO_CUT[way]))

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def equal(text: str) -> None:
        assert counted.table.encode([text, text]) == [counted.whole(text)] * 2

    equal()


def test_known_words_are_not_encoded_again_and_long_ones_are() -> None:
    counted = Counted(tokenizer_with(WAYS_TO_CUT["gpt-2"]))
    (first,) = counted.table.encode([f"{START}the the stone"])
    assert first == counted.whole(f"{START}the the stone")
    assert counted.encoded == ["the", " the", " stone"]
    counted.encoded.clear()
    counted.table.encode([f"{END} the the stone the"], max_new_chars=len(" stone"))
    assert counted.encoded == [" stone"]
    with pytest.raises(TooMuchToEncodeError, match="6 characters"):
        counted.table.encode([" the stone"], max_new_chars=5)


@pytest.mark.parametrize("text", ["the é", "the " * (MAX_CHARS // 4 + 1)])
def test_other_than_short_texts_of_ascii_are_left_to_the_tokenizer(text: str) -> None:
    counted = Counted(tokenizer_with(WAYS_TO_CUT["gpt-2"]))
    assert counted.table.encode([text]) == [counted.whole(text)]
    assert counted.encoded == [text]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": split_by(r"\p{L}+|\s+")},
        {"model": models.BPE(dropout=0.1)},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
    ],
)
def test_a_tokenizer_that_is_not_known_to_encode_words_apart_has_no_table(
    change: dict[str, Any],
) -> None:
    tokenizer = tokenizer_with(WAYS_TO_CUT["gpt-2"])
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert word_table(tokenizer.to_str().encode(), lambda texts: []) is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", special=True, lstrip=True),
        AddedToken("<x>", special=True, rstrip=True),
        AddedToken("<x>", special=True, normalized=True),
        AddedToken("<x>", special=True, single_word=True),
    ],
)
def test_nor_has_one_whose_added_tokens_look_at_their_neighbours(token: AddedToken) -> None:
    tokenizer = tokenizer_with(WAYS_TO_CUT["gpt-2"], [token])
    assert word_table(tokenizer.to_str().encode(), lambda texts: []) is None


def test_a_normalizer_that_leaves_ascii_alone_changes_nothing() -> None:
    tokenizer = tokenizer_with(WAYS_TO_CUT["qwen 2"])
    tokenizer.normalizer = normalizers.NFC()
    counted = Counted(tokenizer)
    text = f"{START}the e\u0301 12"
    assert counted.table.encode([text]) == [counted.whole(text)]


def test_an_encoder_uses_it_within_a_scope() -> None:
    encoder = Encoder(tiny_bundle())
    text = f"{START}user\nthe lo{END}\n"
    plain = encoder.encode(text, add_special_tokens=False)
    assert encoder.encode(text, add_special_tokens=False, scope="a") == plain
    again = encoder.encode(f"{text}{text}", add_special_tokens=False, scope="b", max_new_chars=7)
    assert again == plain + plain

"""Text that was seen before is not encoded again, and its ids are those of a full encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from engine.frontend.encoder import Encoder
from engine.frontend.segments import (
    SegmentCache,
    TooMuchToEncodeError,
    check_num_new,
    cut_pattern,
)
from tests.engine.frontend.tiny_tokenizer import byte_alphabet, tiny_bundle

START, END = "<|im_start|>", "<|im_end|>"
PIECES = st.sampled_from(
    [START, END, "<bos>", "the ", " the", "lo", "\n", " ", "<|im", "_start|>", "<", "|>", "ä中"]
)
TEXTS = st.lists(PIECES, max_size=24).map("".join)


def byte_level(*, add_prefix_space: bool) -> Tokenizer:
    vocab = {name: i for i, name in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return tokenizer


def metaspace(*, prepend_scheme: str, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    names = ["<unk>", *byte_alphabet(), "▁", "▁the", "the", "lo"]
    scores = [(name, -float(i)) for i, name in enumerate(dict.fromkeys(names))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_level(add_prefix_space=False),
    "bytes, prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace, first": lambda: metaspace(prepend_scheme="first", normalizer=None),
    "metaspace, always": lambda: metaspace(prepend_scheme="always", normalizer=None),
    "prepended, lower case": lambda: metaspace(
        prepend_scheme="never",
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Lowercase()]),
    ),
    "stripped": lambda: metaspace(prepend_scheme="first", normalizer=normalizers.Strip()),
}


class Counted:
    """A cache over a tokenizer, counting what is encoded."""

    def __init__(self, tokenizer: Tokenizer, *, max_chars: int = 10_000) -> None:
        self.tokenizer = tokenizer
        self.encoded: list[str] = []
        pattern = cut_pattern(tokenizer.to_str().encode())
        assert pattern is not None
        self.cache = SegmentCache(pattern, self._encode, max_chars=max_chars)

    def _encode(self, texts: Sequence[str], max_new_chars: int | None) -> list[list[int]]:
        check_num_new(sum(map(len, texts)), max_new_chars)
        self.encoded += texts
        return [self.whole(text) for text in texts]

    def whole(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def with_specials(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    usual = [AddedToken(text, special=True, normalized=False) for text in (START, END, "<bos>")]
    tokenizer.add_special_tokens([*usual, *tokens])
    return tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_equal_those_of_a_full_encoding(name: str) -> None:
    counted = Counted(with_specials(TOKENIZERS[name]()), max_chars=3000)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def equal(text: str) -> None:
        assert counted.cache.encode(text, scope="a") == counted.whole(text)

    equal()


@settings(max_examples=100, deadline=None)
@given(
    TEXTS,
    st.lists(
        st.builds(
            AddedToken,
            st.sampled_from(["<|im_start|>A", "\n<|im", "|><|im_start|>", ">the", "A", "the"]),
            special=st.booleans(),
            normalized=st.booleans(),
            lstrip=st.booleans(),
            rstrip=st.booleans(),
            single_word=st.booleans(),
        ),
        max_size=3,
    ),
)
def test_ids_are_equal_whatever_else_is_added(text: str, added: list[AddedToken]) -> None:
    tokenizer = with_specials(byte_level(add_prefix_space=True), *added)
    pattern = cut_pattern(tokenizer.to_str().encode())
    if pattern is None:
        return

    def encode(texts: Sequence[str], max_new_chars: int | None) -> list[list[int]]:
        return [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]

    cache = SegmentCache(pattern, encode)
    assert cache.encode(text, scope="") == encode([text], None)[0]


@pytest.mark.parametrize(
    ("token", "other"),
    [
        (AddedToken(START, special=True, normalized=False, lstrip=True), None),
        (AddedToken(START, special=True, normalized=False, single_word=True), None),
        (AddedToken(START, special=True, normalized=True), None),
        (AddedToken(START, special=True, normalized=False), "\n<|im"),
        (AddedToken(START, special=True, normalized=False), "x<|im_start|>y"),
    ],
)
def test_no_cut_where_something_could_see_across_it(token: AddedToken, other: str | None) -> None:
    tokenizer = byte_level(add_prefix_space=False)
    tokenizer.add_special_tokens([token])
    if other is not None:
        tokenizer.add_tokens([AddedToken(other, normalized=False)])
    assert cut_pattern(tokenizer.to_str().encode()) is None


def test_the_next_turn_encodes_only_what_is_new() -> None:
    counted = Counted(with_specials(byte_level(add_prefix_space=False)))
    first = f"{START}system\nthe rules{END}\n{START}user\nhello{END}\n{START}assistant\n"
    counted.cache.encode(first, scope="a")
    counted.encoded.clear()
    second = f"{first}hi{END}\n{START}user\nand now?{END}\n{START}assistant\n"
    num_new = len(f"{START}assistant\nhi{START}user\nand now?")
    with pytest.raises(TooMuchToEncodeError, match=f"{num_new} characters"):
        counted.cache.encode(second, scope="a", max_new_chars=num_new - 1)
    found = counted.cache.encode(second, scope="a", max_new_chars=num_new)
    assert found == counted.whole(second)
    assert counted.encoded == [f"{START}assistant\nhi", f"{START}user\nand now?"]


def test_scopes_share_nothing() -> None:
    counted = Counted(with_specials(byte_level(add_prefix_space=False)))
    text = f"{START}system\nthe secret{END}"
    found = counted.cache.encode(text, scope="a")
    assert counted.cache.encode(text, scope="a", max_new_chars=0) == found
    with pytest.raises(TooMuchToEncodeError, match=f"{len(text)} characters"):
        counted.cache.encode(text, scope="b", max_new_chars=0)


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    counted = Counted(with_specials(byte_level(add_prefix_space=False)), max_chars=2500)
    for i in range(100):
        counted.cache.encode(f"{START}kept", scope="a")
        counted.cache.encode(f"{START}{i:088d}", scope="a")  # 300 characters with their cost
    assert counted.encoded.count(f"{START}kept") == 1
    assert counted.cache.encode(f"{START}{98:088d}", scope="a", max_new_chars=0)
    with pytest.raises(TooMuchToEncodeError, match="100 characters"):
        counted.cache.encode(f"{START}{91:088d}", scope="a", max_new_chars=0)


def test_an_encoder_looks_up_only_in_a_scope_and_where_it_adds_nothing() -> None:
    encoder = Encoder(tiny_bundle())
    text = f"{START}user\nthe lo{END}\n"
    plain = encoder.encode(text, add_special_tokens=False)
    num_new = len("user" + "\n" + "the" + " lo")
    with pytest.raises(TooMuchToEncodeError, match=f"{num_new} characters"):
        encoder.encode(text, add_special_tokens=False, scope="a", max_new_chars=0)
    assert encoder.encode(text, add_special_tokens=False, scope="a") == plain
    assert encoder.encode(text, add_special_tokens=False, scope="a", max_new_chars=0) == plain
    with_bos = encoder.encode(text, add_special_tokens=True, scope="a")
    assert with_bos == [*encoder.encode("<bos>", add_special_tokens=False), *plain]

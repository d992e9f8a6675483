"""Token ids of a text by looking its words up, exactly as the tokenizer would encode it.

A byte-level tokenizer cuts a text into words by a pattern and encodes each word without a glance
at its neighbours, so the ids of a text are those of its words. Here it is cut at the same places,
for tokenizers whose pattern is known and texts of ASCII, where Python reads these patterns as
tokenizers do. Every other text counts as one word. Only words of one token are kept: those are the
vocabulary's, so that nothing here tells what somebody else has sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec

from engine.frontend.added_token import AddedToken
from engine.frontend.segments import check_num_new

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Gives the ids of texts, each by itself."""

MAX_CHARS = 8192
"""Longer texts are left to the tokenizer, which lets other threads run meanwhile."""

_SPACE = r"\t\n\x0b\x0c\r "
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
# Letters and digits before contractions, which begin with neither: most words are tried once.
_GPT2 = (
    rf" ?[A-Za-z]+| ?[0-9]+|{_CONTRACTIONS}| ?[^{_SPACE}A-Za-z0-9]+"
    rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
_GPT2_WITH_SINGLE_DIGITS = (
    rf" ?[A-Za-z]+|[0-9]|{_CONTRACTIONS}| ?[^{_SPACE}A-Za-z0-9]+"
    rf"|[{_SPACE}]+(?![^{_SPACE}0-9])|[{_SPACE}]+"
)
_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}| ?[^{_SPACE}A-Za-z0-9]+[\r\n]*"
    rf"|[{_SPACE}]*[\r\n]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA3,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA3.replace("{1,3}", ""),
}
"""Patterns of tokenizers of the families of Llama 3 and Qwen 2, and what they are in ASCII."""
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}


class _Model(msgspec.Struct, frozen=True):
    type: str | None = None
    dropout: float | None = None


class _TokenizerFile(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class WordTable:
    """Ids of the words of one tokenizer, learned as they come. Thread-safe."""

    def __init__(self, words: re.Pattern[str], added: Mapping[str, int], encode: Encode) -> None:
        """`words` finds the words between the `added` tokens, which have ids of their own."""
        self._words = words
        self._added = _any_of(added)
        self._ids = dict(added)
        self._encode = encode

    def encode(self, texts: Sequence[str], *, max_new_chars: int | None = None) -> list[list[int]]:
        """Return the ids of texts, each by itself.

        If the words that are not known have more than `max_new_chars` characters, raises
        TooMuchToEncodeError instead.
        """
        cut = [self._cut(text) for text in texts]
        try:
            return [_looked_up(words, self._ids) for words in cut]
        except KeyError:
            return self._learn(cut, max_new_chars)

    def _cut(self, text: str) -> list[str]:
        if len(text) > MAX_CHARS or not text.isascii():
            return [text]
        first, *rest = self._added.split(text)
        words = self._words.findall(first)
        for token, between in zip(rest[::2], rest[1::2], strict=True):
            words.append(token)
            words += self._words.findall(between)
        return words

    def _learn(self, cut: list[list[str]], max_new_chars: int | None) -> list[list[int]]:
        known = self._ids
        new = [word for word in dict.fromkeys(chain.from_iterable(cut)) if word not in known]
        check_num_new(sum(map(len, new)), max_new_chars)
        found = dict(zip(new, self._encode(new), strict=True))
        known.update((word, ids[0]) for word, ids in found.items() if len(ids) == 1)
        return [
            [id for word in words for id in (found[word] if word in found else (known[word],))]
            for words in cut
        ]


def word_table(tokenizer_json: bytes, encode: Encode) -> WordTable | None:
    """Return the table of a tokenizer, None where it is not known to encode words apart.

    Added tokens must stand for themselves wherever they occur, and nothing may change a text of
    ASCII before it is cut.
    """
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    pattern = _pattern_of(file.pre_tokenizer or {})
    has_plain_tokens = file.added_tokens and not any(
        token.normalized or token.lstrip or token.rstrip or token.single_word
        for token in file.added_tokens
    )
    encodes_words = file.model.type == "BPE" and not file.model.dropout
    if pattern is None or not (has_plain_tokens and encodes_words):
        return None
    if file.normalizer not in (None, {"type": "NFC"}):
        return None
    added = {token.content: token.id for token in file.added_tokens}
    return WordTable(re.compile(pattern), added, encode)


def _pattern_of(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Return what finds the words of a text of ASCII, None where that is not known."""
    *before, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is not False:
        return None
    if not before:
        return _GPT2 if last.get("use_regex", True) else None
    (first, *others) = before
    if others:
        return None
    if last.get("use_regex", True):
        return _GPT2_WITH_SINGLE_DIGITS if first == _SINGLE_DIGITS else None
    for regex, pattern in _SPLITS.items():
        if first == {**_SPLIT, "pattern": {"Regex": regex}}:
            return pattern
    return None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match the longest of the tokens, as a tokenizer does, in a group for `split`."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _looked_up(words: list[str], ids: Mapping[str, int]) -> list[int]:
    """Return the id of each word; KeyError when one is not known."""
    if len(words) < 2:
        return [ids[word] for word in words]
    return list(itemgetter(*words)(ids))

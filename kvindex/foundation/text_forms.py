"""Forms that a text must have, and the words for them in messages.

A decoder names the regular expression that did not match; a person wants to know what to write.
"""

from __future__ import annotations

import re

import msgspec

_WORDS: dict[str, str] = {}
_PATTERN = re.compile(r"[Ee]xpected `?str`? matching regex '(.*)'")


def text_form(pattern: str, words: str) -> msgspec.Meta:
    """Constrain a text to a regular expression that messages call `words`."""
    _WORDS[pattern] = words
    return msgspec.Meta(pattern=pattern)


def words_of(pattern: str) -> str:
    """Return the words for a form, `text like PATTERN` where it has none."""
    return _WORDS.get(pattern, f"text like {pattern}")


def form_in_words(problem: str) -> str | None:
    """Return what was expected, in words, if a decoder's message is about a text's form."""
    match = _PATTERN.fullmatch(problem)
    return None if match is None else f"expected {words_of(match[1])}"

"""Token ids of text that was seen before: a conversation's next turn encodes only what is new.

A tokenizer looks for its special tokens first and encodes what lies between two of them without a
glance beyond, so a text may be cut where a special token begins. Whatever could see across such a
cut is checked when the tokenizer is loaded; tokens for which it could are never cut at.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from engine.frontend.added_token import AddedToken
from kvindex.foundation.errors import PrefixFleetError

MAX_CACHED_CHARS = 16 * 1024 * 1024
_SEGMENT_COST = 200
"""Characters that a cached segment counts for beyond its own: what the bookkeeping takes."""


class TooMuchToEncodeError(PrefixFleetError):
    """Raised when encoding would take longer than its caller can wait: do it in a thread."""

    kind = "too_much_to_encode"


class _TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: list[AddedToken] = []


def cut_pattern(tokenizer_json: bytes) -> re.Pattern[str] | None:
    """Return what matches the special tokens that a text may be cut before, None without any.

    Such a token is found in the text as it is (not normalized), takes nothing from before it
    (lstrip) and does not care what stands there (single_word); and no added token can begin before
    it and end inside or behind it.
    """
    added = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).added_tokens
    cuttable = [
        token.content
        for token in added
        if token.special
        and token.content
        and not (token.normalized or token.lstrip or token.single_word)
        and not any(_reaches_into(other.content, token.content) for other in added)
    ]
    if not cuttable:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(cuttable, key=len, reverse=True)))


def _reaches_into(other: str, token: str) -> bool:
    """Whether `other` could begin before an occurrence of `token` and end after its beginning."""
    tails = (other[i:] for i in range(1, len(other)))
    return any(tail.startswith(token) or token.startswith(tail) for tail in tails)


class SegmentCache:
    """Token ids by (scope, segment), least recently used ones go first. Thread-safe.

    Scopes see nothing of each other, not even by how long an encoding takes: one that may not find
    another's cached blocks must not find its text here either.
    """

    def __init__(
        self,
        pattern: re.Pattern[str],
        encode: Callable[[Sequence[str], int | None], list[list[int]]],
        *,
        max_chars: int = MAX_CACHED_CHARS,
    ) -> None:
        """`encode` gives the ids of texts, each by itself, if not too much of them is new."""
        self._pattern = pattern
        self._encode = encode
        self._max_chars = max_chars
        self._num_chars = 0
        self._lock = threading.Lock()
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def encode(self, text: str, *, scope: str, max_new_chars: int | None = None) -> list[int]:
        """Return the ids of a text, exactly those of encoding it as a whole.

        If more than `max_new_chars` of it are new, raises TooMuchToEncodeError instead.
        """
        segments = self.split(text)
        found = self._find(segments, scope)
        new = [s for s in dict.fromkeys(segments) if s not in found]
        if new:
            encoded = [array("I", ids) for ids in self._encode(new, max_new_chars)]
            found.update(zip(new, encoded, strict=True))
            self._keep(new, encoded, scope)
        ids = array("I")
        for segment in segments:
            ids.extend(found[segment])
        return ids.tolist()

    def split(self, text: str) -> list[str]:
        """Cut a text before each of the special tokens that allow it."""
        cuts = [0, *(match.start() for match in self._pattern.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]

    def _find(self, segments: Sequence[str], scope: str) -> dict[str, array[int]]:
        found = {}
        with self._lock:
            for segment in segments:
                ids = self._ids.get((scope, segment))
                if ids is not None:
                    self._ids.move_to_end((scope, segment))
                    found[segment] = ids
        return found

    def _keep(self, segments: Sequence[str], encoded: Sequence[array[int]], scope: str) -> None:
        with self._lock:
            for segment, ids in zip(segments, encoded, strict=True):
                if (scope, segment) not in self._ids:
                    self._num_chars += len(segment) + _SEGMENT_COST
                self._ids[scope, segment] = ids
            while self._num_chars > self._max_chars:
                (_, oldest), _ = self._ids.popitem(last=False)
                self._num_chars -= len(oldest) + _SEGMENT_COST


def check_num_new(num_chars: int, max_new_chars: int | None) -> None:
    """Raise TooMuchToEncodeError unless so much may be encoded; None: anything."""
    if max_new_chars is not None and num_chars > max_new_chars:
        raise TooMuchToEncodeError(f"{num_chars} characters")

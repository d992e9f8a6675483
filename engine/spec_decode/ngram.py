"""Guesses from the request's own text: what followed when its last few tokens came before.

Finds copies (code edits, quotations, retrieval) and loops. It keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.spec_decode.proposer import DraftContext

_TOKEN_BYTES = 4


class NgramProposer:
    """Looks for the longest n-gram at the end, of `min_ngram` to `max_ngram` tokens."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram, "n-grams must have a length"
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        """Return what followed each request's n-gram the first time; see Proposer."""
        found = {
            context.request_id: continuation(
                context.token_ids,
                min_ngram=self._min_ngram,
                max_ngram=self._max_ngram,
                count=context.max_drafts,
            )
            for context in contexts
        }
        return {request_id: drafts for request_id, drafts in found.items() if drafts}

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def continuation(token_ids: memoryview, *, min_ngram: int, max_ngram: int, count: int) -> list[int]:
    """Return up to `count` tokens that followed the longest n-gram at the end, where it came first.

    The n-gram may overlap its own repetition. Linear in the text: each length is one search over
    its bytes. `token_ids` are int32. The rule is prompt lookup decoding (Saxena 2023), as in vLLM.
    """
    text = token_ids.tobytes()
    num_tokens = len(token_ids)
    for length in range(min(max_ngram, num_tokens - 1), min_ngram - 1, -1):
        start = _find(text, text[-length * _TOKEN_BYTES :], end=len(text) - _TOKEN_BYTES)
        if start is not None:
            return token_ids[start + length : start + length + count].tolist()
    return []


def _find(text: bytes, ngram: bytes, *, end: int) -> int | None:
    """Return the first token position in text[:end] where an n-gram stands, None without one."""
    at = text.find(ngram, 0, end)
    while at >= 0 and at % _TOKEN_BYTES:  # A match that begins within a token is none.
        at = text.find(ngram, at + 1, end)
    return None if at < 0 else at // _TOKEN_BYTES

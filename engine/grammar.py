"""Grammars as the engine sees them: the seam to back ends, and one request's way through its own.

Masks are bytes: bit `t % 8` of byte `t // 8` says whether token t may come next. Which language a
grammar is written in, and how it is compiled, is the back end's business; what the masks are
laid on is the runner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from engine.frontend.sampling_params import GrammarSpec, ThinkingSpan
from kvindex.foundation.errors import PrefixFleetError


class GrammarError(PrefixFleetError):
    """Raised when a grammar cannot be compiled, or when an output cannot go on by it."""


class Matcher(Protocol):
    """A position in a grammar. End tokens are none of its business: it never allows one."""

    @property
    def is_accepting(self) -> bool:
        """Whether what was accepted so far is a whole text of the grammar."""
        ...

    def mask(self) -> bytes:
        """Return which tokens may come next; none may when the text cannot go on."""
        ...

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens could be accepted; nothing changes."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens; GrammarError when one of them does not fit."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by the requests that ask for it."""

    def matcher(self) -> Matcher:
        """Return a new position at its beginning."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars and keeps those in use lately."""

    def prepare(self, spec: GrammarSpec) -> None:
        """Begin to compile where that takes no time of the caller's."""
        ...

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return a grammar, compiling it or waiting for it if need be; raises GrammarError."""
        ...

    def close(self) -> None:
        """Give threads and memory back. Idempotent."""
        ...


_Phase = Literal["unopened", "thinking", "ruled", "ended"]


class OutputGrammar:
    """One request's output along its grammar, up to its last known token.

    Once the text is whole, the end tokens are allowed too, and nothing else when it cannot go on.
    Before the grammar rules, the output may think: then every token is free but those that would
    end it, because an answer is still owed.
    """

    __slots__ = ("_end_ids", "_free", "_matcher", "_phase", "_thinking", "_vocab_size")

    def __init__(
        self,
        matcher: Matcher,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int],
        thinking: ThinkingSpan | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = frozenset(t for t in end_token_ids if 0 <= t < vocab_size)
        self._thinking = thinking
        self._phase: _Phase = "ruled"
        if thinking is not None:
            self._phase = "thinking" if thinking.begin_token_id is None else "unopened"
        self._free: bytes | None = None

    def valid_prefix(self, drafts: Sequence[int]) -> int:
        """Return how many leading drafts the output could go on with; nothing changes."""
        phase, num_ruled, num_valid = self._phase, 0, 0
        for token_id in drafts:
            if not self._fits(token_id):
                break
            num_ruled += self._step(token_id)
            num_valid += 1
        if num_ruled:
            self._matcher.rollback(num_ruled)
        self._phase = phase
        return num_valid

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by sampled tokens; GrammarError when one of them does not fit."""
        for token_id in token_ids:
            self._step(token_id)

    def mask(self) -> bytes:
        """Return which tokens may come next, at least one; GrammarError when there is none."""
        if self._phase == "thinking":
            if self._free is None:
                free = bytearray(b"\xff" * ((self._vocab_size + 7) // 8))
                self._free = _changed(free, self._end_ids, allow=False)
            return self._free
        if self._phase == "ended":
            none = bytearray((self._vocab_size + 7) // 8)
            return _changed(none, self._end_ids, allow=True)
        bits = self._matcher.mask()
        if self._phase == "unopened":
            assert self._thinking is not None
            begin = self._thinking.begin_token_id
            assert begin is not None
            return _changed(bytearray(bits), (begin,), allow=True)
        if not self._matcher.is_accepting:
            if not any(bits):
                raise GrammarError("no token of this model goes on with the grammar")
            return bits
        if not (any(bits) or self._end_ids):
            raise GrammarError("the text is complete, and the model has no token to say so")
        return _changed(bytearray(bits), self._end_ids, allow=True)

    def _fits(self, token_id: int) -> bool:
        match self._phase:
            case "thinking":
                return token_id not in self._end_ids
            case "ended":
                return token_id in self._end_ids
            case "unopened" if self._opens_thinking(token_id):
                return True
        if self._matcher.valid_prefix((token_id,)):
            return True
        return token_id in self._end_ids and self._matcher.is_accepting

    def _step(self, token_id: int) -> bool:
        """Take one token; tell whether it was the matcher's."""
        if self._phase == "thinking":
            assert self._thinking is not None
            if token_id == self._thinking.end_token_id:
                self._phase = "ruled"
            return False
        if self._phase == "ended":
            return False
        if self._opens_thinking(token_id):
            self._phase = "thinking"
            return False
        if token_id in self._end_ids and not self._matcher.valid_prefix((token_id,)):
            if not self._matcher.is_accepting:
                raise GrammarError(f"end token {token_id} came before the text was complete")
            self._phase = "ended"
            return False
        self._phase = "ruled"
        self._matcher.accept((token_id,))
        return True

    def _opens_thinking(self, token_id: int) -> bool:
        return (
            self._phase == "unopened"
            and self._thinking is not None
            and token_id == self._thinking.begin_token_id
        )


def allowed_token_ids(mask: bytes) -> list[int]:
    """List the tokens of a mask, in order."""
    number = int.from_bytes(mask, "little")
    return [t for t in range(number.bit_length()) if number >> t & 1]


def _changed(bits: bytearray, token_ids: Iterable[int], *, allow: bool) -> bytes:
    for token_id in token_ids:
        if allow:
            bits[token_id >> 3] |= 1 << (token_id & 7)
        else:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(bits)

"""Grammars for an executor without a model: a choice between texts, where tokens are bytes.

The smallest back end there is; with it, masks, drafts and failures are shown without a library.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.sampling_params import GrammarSpec
from engine.grammar import GrammarError, allowed_token_ids


class ChoiceBackend:
    """Compiles `choice` specs alone: token t is the byte t."""

    def prepare(self, spec: GrammarSpec) -> None:
        """Do nothing: there is nothing to wait for."""

    def compile(self, spec: GrammarSpec) -> ChoiceGrammar:
        if spec.kind != "choice":
            raise GrammarError(f"{spec.kind} is not served here")
        try:
            texts = msgspec.json.decode(spec.text, type=list[str])
        except msgspec.DecodeError as error:
            raise GrammarError(f"choice: {error}") from None
        return ChoiceGrammar([text.encode() for text in texts])

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class ChoiceGrammar:
    """Some texts, one of which is to be said."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts

    def matcher(self) -> ChoiceMatcher:
        return ChoiceMatcher(self._texts)


class ChoiceMatcher:
    """What has been said of one of the texts."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._said = b""

    @property
    def is_accepting(self) -> bool:
        return self._said in self._texts

    def mask(self) -> bytes:
        position = len(self._said)
        following = {t[position] for t in self._texts if t.startswith(self._said) and t[position:]}
        return sum(1 << token_id for token_id in following).to_bytes(32, "little")

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        said = self._said
        for i, token_id in enumerate(token_ids):
            said += bytes([token_id])
            if not any(text.startswith(said) for text in self._texts):
                return i
        return len(token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        if self.valid_prefix(token_ids) < len(token_ids):
            raise GrammarError(f"no text goes on from {self._said!r} with {list(token_ids)}")
        self._said += bytes(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._said = self._said[: len(self._said) - num_tokens]


def ruled_token(token_id: int, mask: bytes, *, banned: set[int]) -> int:
    """Return a token of the mask, the same for the same token; a banned one if all are."""
    allowed = allowed_token_ids(mask)
    free = [each for each in allowed if each not in banned] or allowed
    return free[token_id % len(free)]

"""Token ids to text, one token at a time, never half a character.

It decodes a short window again for each token, as tokenizers of every kind need (a token's text
may depend on its neighbours). It knows no stop strings and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from engine.frontend.encoder import Encoder

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
# Tokens of an unfinished character: it has four bytes at most, the last of them missing.
_MAX_UNFINISHED_TOKENS = 3
# Whoever generates longer runs of undecodable bytes gets them as U+FFFD at last, so neither
# memory nor time grows with them.
_MAX_PENDING_TOKENS = 12


class Detokenizer:
    """The text of a growing output.

    Text never depends on how the tokens were grouped into steps. What is emitted starts where
    the prompt ended: a character that the prompt began and the output completes is emitted
    whole, the prompt's own text never is. Bytes that are no UTF-8 come out as U+FFFD; special
    tokens show only if they are not skipped.
    """

    __slots__ = ("_context", "_context_text", "_decode", "_pending", "_unfinished_text")

    def __init__(
        self,
        encoder: Encoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode = partial(encoder.decode, skip_special_tokens=skip_special_tokens)
        self._context, self._pending = _split_prompt(self._decode, prompt_token_ids)
        self._context_text = self._decode(self._context)
        # How the prompt's unfinished character looks as long as nothing completes it.
        self._unfinished_text = self._window_text()[len(self._context_text) :]

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is complete with it, "" while there is none."""
        self._pending.append(token_id)
        text = self._window_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return what is left when no token follows; an unfinished character becomes U+FFFD."""
        return self._emit(self._window_text()) if self._pending else ""

    def _window_text(self) -> str:
        return self._decode(self._context + self._pending)

    def _emit(self, text: str) -> str:
        if text.startswith(self._context_text):
            new = text[len(self._context_text) :]
        else:  # invalid bytes that make the decoder read their neighbours anew
            new = self._decode(self._pending)
        unfinished, self._unfinished_text = self._unfinished_text, ""
        if not new.startswith(unfinished):
            # Completed; what stands before it in the same token is still the prompt's.
            unfinished = unfinished.rstrip(_REPLACEMENT)
        new = new.removeprefix(unfinished)
        if new:
            self._context = self._pending
        elif len(self._context) < _MAX_PENDING_TOKENS:
            # Tokens without text of their own still have a say in how the next one looks.
            self._context = self._context + self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        return new


def _split_prompt(
    decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the last tokens of a prompt that are whole characters, and what begins one more.

    Both are empty when the prompt's end is no text at all: without context nothing can leak.
    """
    window = list(prompt_token_ids[-_CONTEXT_TOKENS - _MAX_UNFINISHED_TOKENS :])
    cuts = range(_MAX_UNFINISHED_TOKENS + 1)
    for num_unfinished, num_skipped in product(cuts, cuts):
        end = len(window) - num_unfinished
        context = window[num_skipped:end]
        if (context or end == 0) and _REPLACEMENT not in decode(context):
            return context, window[end:]
    return [], []

"""Log probabilities as clients see them: OpenAI's two shapes, and vLLM's for prompts.

A token that is no whole character shows U+FFFD in its text; `bytes` are always exact. It knows no
requests; which entries belong to an answer is the fold's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.frontend.logprobs import TokenLogprobs

LOWEST = -9999.0
"""What stands for the log probability of the impossible, which JSON cannot write (as in vLLM)."""


class TokenTexts(Protocol):
    """What is needed of an encoder."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        ...


class TopLogprob(msgspec.Struct, frozen=True):
    """One likely token at some position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The token that was chosen, and the likeliest ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion's choice, four lists side by side; an echoed first token has None.

    `text_offset` counts the characters of the choice's text before each token.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a position of a prompt; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By position, then by token id; the first token of a prompt follows nothing, so it has None."""


def chat_logprobs(entries: Sequence[TokenLogprobs], encoder: TokenTexts) -> ChatLogprobs:
    """Show entries in the shape of chat completions."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                *_shown(entry.token_id, entry.logprob, encoder),
                [TopLogprob(*_shown(*top, encoder)) for top in entry.top],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprobs], offsets: Sequence[int], encoder: TokenTexts
) -> CompletionLogprobs:
    """Show entries, and where in the text each begins, in the shape of completions."""
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        tokens=[_text(entry.token_id, encoder) for entry in entries],
        top_logprobs=[_top(entry, encoder) for entry in entries],
    )


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    encoder: TokenTexts,
) -> CompletionLogprobs:
    """Show those of a prompt in the shape of completions; of the first token only its text."""
    rest = completion_logprobs(entries, offsets[1:], encoder)
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[None, *rest.token_logprobs],
        tokens=[_text(prompt_token_ids[0], encoder), *rest.tokens],
        top_logprobs=[None, *rest.top_logprobs],
    )


def joined(first: CompletionLogprobs | None, more: CompletionLogprobs) -> CompletionLogprobs:
    """Return the logprobs of one text after the other; `first` may be missing."""
    if first is None:
        return more
    return CompletionLogprobs(
        first.text_offset + more.text_offset,
        first.token_logprobs + more.token_logprobs,
        first.tokens + more.tokens,
        first.top_logprobs + more.top_logprobs,
    )


def joined_chat(first: ChatLogprobs | None, more: ChatLogprobs) -> ChatLogprobs:
    """Return the same for chat."""
    return more if first is None else ChatLogprobs(first.content + more.content)


def prompt_logprobs(entries: Sequence[TokenLogprobs], encoder: TokenTexts) -> PromptLogprobs:
    """Show those of a prompt by token id: each token itself, then the likeliest others."""
    shown: PromptLogprobs = [None]
    for entry in entries:
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        for i, (token, logprob) in enumerate(entry.top):
            ranked.setdefault(token, (logprob, i + 1))
        shown.append(
            {
                token: PromptLogprob(max(logprob, LOWEST), rank, _text(token, encoder))
                for token, (logprob, rank) in ranked.items()
            }
        )
    return shown


def _shown(token_id: int, logprob: float, encoder: TokenTexts) -> tuple[str, float, list[int]]:
    data = encoder.token_bytes(token_id)
    return data.decode("utf-8", "replace"), max(logprob, LOWEST), list(data)


def _text(token_id: int, encoder: TokenTexts) -> str:
    return encoder.token_bytes(token_id).decode("utf-8", "replace")


def _top(entry: TokenLogprobs, encoder: TokenTexts) -> dict[str, float]:
    """Return the likeliest tokens by their text, and the chosen one; of equal texts the likelier.

    Different tokens look the same where they are parts of characters.
    """
    top = {_text(token, encoder): logprob for token, logprob in reversed(entry.top)}
    chosen = _text(entry.token_id, encoder)
    if chosen not in top:
        top[chosen] = entry.logprob
    return {
        token: max(top[token], LOWEST) for token in sorted(top, key=top.__getitem__, reverse=True)
    }

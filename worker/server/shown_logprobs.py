"""What an answer shows of log probabilities, given what its request asked for.

The shapes are engine/frontend/logprob_shapes.py's. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.encoder import Encoder
from engine.frontend.logprob_shapes import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from engine.frontend.logprobs import TokenLogprobs
from worker.server.generation import Choice, Generation


def shown_prompt_logprobs(
    generation: Generation, choice: Choice, encoder: Encoder
) -> PromptLogprobs | UnsetType:
    """Show those of a choice's prompt, if `prompt_logprobs` asked for them. O(prompt)."""
    asked, entries = generation.request.prompt_logprobs, choice.prompt_logprobs
    if asked is None or entries is None:
        return UNSET
    return prompt_logprobs(_limited(entries, asked), encoder)


def shown_echo_logprobs(
    generation: Generation, choice: Choice, encoder: Encoder
) -> CompletionLogprobs | None:
    """Show those of an echoed prompt, if `logprobs` asked for them. O(prompt)."""
    echo, asked = generation.echo_of(choice), generation.request.num_logprobs
    if echo is None or asked is None:
        return None
    entries = _limited(choice.prompt_logprobs or [], asked)
    return echoed_logprobs(generation.prompt_of(choice), entries, echo.offsets, encoder)


def shown_logprobs(
    generation: Generation,
    choice: Choice,
    entries: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    *,
    encoder: Encoder,
) -> CompletionLogprobs | None:
    """Show those of some output tokens of a completion, whose text an echo may precede."""
    if generation.request.num_logprobs is None:
        return None
    echo = generation.echo_of(choice)
    num_before = 0 if echo is None else len(echo.text)
    return completion_logprobs(entries, [num_before + offset for offset in offsets], encoder)


def shown_whole_logprobs(
    generation: Generation, choice: Choice, encoder: Encoder
) -> CompletionLogprobs | None:
    """Show those of all that a completion's choice answers. O(prompt and output)."""
    fold = choice.fold
    shown = shown_logprobs(generation, choice, fold.logprobs, fold.text_offsets, encoder=encoder)
    if shown is None:
        return None
    return joined(shown_echo_logprobs(generation, choice, encoder), shown)


def _limited(entries: Sequence[TokenLogprobs], num_top: int) -> Sequence[TokenLogprobs]:
    """Leave out alternatives that another field of the request asked for."""
    if all(len(entry.top) <= num_top for entry in entries):
        return entries
    return [msgspec.structs.replace(entry, top=entry.top[:num_top]) for entry in entries]

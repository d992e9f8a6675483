"""The prompt as a part of its own answer: completions with `echo`.

Text and offsets come from the prompt's tokens, so they are the same whoever tokenized it. It knows
no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.detokenizer import Detokenizer
from engine.frontend.encoder import Encoder
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest


class Echo(msgspec.Struct, frozen=True):
    """The text of a prompt, and where in it each token begins (only with log probabilities)."""

    text: str
    offsets: list[int]


def echo_of(
    request: ChatCompletionRequest | CompletionRequest,
    prompt_token_ids: Sequence[int],
    encoder: Encoder,
) -> Echo | None:
    """Return what a request wants to see of a prompt; None when it wants nothing. O(tokens)."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        return None
    skip = request.skip_special_tokens
    if request.num_logprobs is None:
        return Echo(encoder.decode(prompt_token_ids, skip_special_tokens=skip), [])
    detokenizer = Detokenizer(encoder, [], skip_special_tokens=skip)
    text, offsets = "", []
    for token_id in prompt_token_ids:
        offsets.append(len(text))
        text += detokenizer.push(token_id)
    return Echo(text + detokenizer.flush(), offsets)

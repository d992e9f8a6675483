"""The bodies of /tokenize and /detokenize, and their answers; replica and gateway share them.

It knows no HTTP and not which models there are.
"""

from __future__ import annotations

import msgspec

from engine.frontend.errors import invalid_value
from engine.frontend.openai import ChatMessage
from engine.frontend.params import check_token_ids
from engine.frontend.parse import parse_as
from engine.frontend.prompt import PromptEncoder


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a text; `max_model_len` None is unknown."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Text of token ids."""

    prompt: str


def parse_tokenize_request(body: bytes) -> TokenizeRequest:
    """Parse and check a body; raise RequestError naming the field."""
    given = parse_as(body, TokenizeRequest)
    if (given.prompt is None) == (given.messages is None):
        raise invalid_value("prompt", "send either prompt or messages")
    return given


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Parse and check a body; raise RequestError naming the field."""
    return parse_as(body, DetokenizeRequest)


def tokenize(
    given: TokenizeRequest, prompts: PromptEncoder, *, max_model_len: int | None
) -> TokenizeAnswer:
    """Turn a text, or a conversation as the model sees it, into token ids."""
    encoder, text = prompts.encoder, given.prompt
    special = given.add_special_tokens
    if given.messages is not None:
        text = prompts.render(given.messages, add_generation_prompt=given.add_generation_prompt)
    assert text is not None, "a checked body has a prompt or messages"
    tokens = encoder.encode(
        text, add_special_tokens=given.messages is None if special is None else special
    )
    names = [encoder.token_text(token) for token in tokens] if given.return_token_strs else None
    return TokenizeAnswer(
        count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=names
    )


def detokenize(given: DetokenizeRequest, prompts: PromptEncoder) -> DetokenizeAnswer:
    """Turn token ids into text, special tokens included."""
    encoder = prompts.encoder
    check_token_ids(given.tokens, vocab_size=encoder.vocab_size, param="tokens")
    return DetokenizeAnswer(encoder.decode(given.tokens, skip_special_tokens=False))

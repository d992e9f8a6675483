"""Whether a foreign engine turns text into the tokens that the pool does: asked, not trusted.

A known prompt and a known conversation are tokenized by both sides. It decides what a difference
means; it credits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.errors import HashMismatchError
from router.fleet.client import ReplicaFailure
from router.fleet.vllm_engine import VllmEngine

KNOWN_PROMPT = "The known prompt: 12 + 30 = 42, naïve café, 東京, \U0001f600.\n\tEnd"
KNOWN_CONVERSATION = [
    {"role": "system", "content": "You are a terse assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And naïve café?"},
]


async def template_trouble(engine: VllmEngine, encoder: PromptEncoder, *, model: str) -> str | None:
    """Return why conversations cannot be predicted for an engine, None when they can.

    Raises HashMismatchError when plain text already becomes other tokens, ReplicaFailure when the
    engine cannot be reached.
    """
    prompt = parse_completion_request(msgspec.json.encode({"model": model, "prompt": KNOWN_PROMPT}))
    (ours,) = encoder.completion(prompt)
    theirs = await engine.tokenize({"model": model, "prompt": KNOWN_PROMPT})
    if ours != theirs:
        raise HashMismatchError(
            f"engine {engine.url} makes the known prompt {_differing(theirs, ours)}: "
            "it is of another model or tokenizer"
        )
    return await _chat_trouble(engine, encoder, model)


async def _chat_trouble(engine: VllmEngine, encoder: PromptEncoder, model: str) -> str | None:
    body = {"model": model, "messages": KNOWN_CONVERSATION}
    try:
        ours = encoder.chat(parse_chat_request(msgspec.json.encode(body)))
    except RequestError:
        return None  # The model has no template, so no conversation comes here either.
    try:
        theirs = await engine.tokenize({**body, "add_generation_prompt": True})
    except ReplicaFailure as failure:
        if failure.status is None:
            raise
        return f"its chat template cannot be checked: {failure}"
    if ours != theirs:
        return f"its chat template makes the known conversation {_differing(theirs, ours)}"
    return None


def _differing(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Say where two sequences part."""
    pairs = enumerate(zip(theirs, ours, strict=False))
    first = next((i for i, (left, right) in pairs if left != right), min(len(theirs), len(ours)))
    return (
        f"{len(theirs)} tokens where the pool makes {len(ours)}, "
        f"and token {first} is {theirs[first : first + 1]} where the pool has "
        f"{ours[first : first + 1]}"
    )

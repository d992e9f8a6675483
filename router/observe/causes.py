"""Why a replica found another number of tokens cached than was predicted.

A workload miss, a routing miss and a stale index look the same in one hit rate; here each request
says which it was. Pure; it judges one finished request by what was known when it was placed.
"""

from __future__ import annotations

from typing import Literal

from router.policy.types import Place
from router.request.usage import RealisedUsage

Cause = Literal[
    "none",
    "template",
    "fallback",
    "degraded",
    "salt",
    "evicted",
    "pending",
    "sibling",
    "stored_since",
    "several_prompts",
]
"""`none`: as predicted. `template`: the replica counts other prompt tokens than we do. `fallback`,
`degraded`: the prediction was a guess. `salt`: a foreign engine found nothing of what it had
stored, as if under another salt. `evicted`: blocks went between prediction and admission.
`pending`: a sibling's prefix that was waited for never came. `sibling`: it came, as expected.
`stored_since`: more was there than anybody announced. `several_prompts`: only the first one was
predicted."""


def cause_of(
    place: Place,
    usage: RealisedUsage,
    *,
    num_prompt_tokens: int,
    num_prompts: int,
    is_foreign: bool,
) -> Cause | None:
    """Name the cause of a difference; None when the replica does not say what it found."""
    realised, winner = usage.cached_tokens, place.winner
    if realised is None:
        return None
    predicted, expected = winner.num_cached_tokens, winner.num_reusable_tokens
    if num_prompts > 0 and usage.prompt_tokens != num_prompt_tokens:
        return "template"
    if realised == predicted == expected:
        return "none"
    if winner.mode != "EXACT":
        return "none" if realised == predicted else _guess(place)
    if num_prompts > 1:
        return "several_prompts"
    if realised < predicted:
        return "salt" if is_foreign and not realised else "evicted"
    if realised < expected:
        return "pending"
    return "sibling" if realised == expected else "stored_since"


def _guess(place: Place) -> Cause:
    return "degraded" if place.winner.mode == "DEGRADED" else "fallback"


def available_tokens(place: Place) -> int:
    """Return the most tokens of the prompt that any target held, chosen or not."""
    return max([candidate.num_cached_tokens for candidate in place.candidates])

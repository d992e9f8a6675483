"""How likely the model found a token, beside the likeliest others at its position.

Raw log probabilities: before penalties, temperature and any mask. It knows no text.
"""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position. `rank` counts from 1: how many tokens are at least as likely.

    `top`: the asked-for number of likeliest tokens with their log probabilities, likeliest first;
    the token itself is among them only if it is that likely.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []

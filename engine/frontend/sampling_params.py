"""How the next tokens of one request are chosen, and when to stop.

Values are checked where they enter (openai.py); this Struct also travels to the engine core.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one choice.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. The draw at output position p of
    choice c is a function of (seed, c, p) alone, so it survives batching, preemption and moving
    to another replica. `max_tokens` None is "up to the model's length".
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

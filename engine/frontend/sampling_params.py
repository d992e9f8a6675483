"""How the next tokens of one request are chosen, and when to stop.

Values are checked where they enter (openai.py); this Struct also travels to the engine core.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal[
    "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "tool_calls"
]


class ThinkingSpan(msgspec.Struct, frozen=True):
    """Free text before the grammar rules, up to the token `end_token_id`.

    `begin_token_id` may open it as the very first token; None: it is open when the output begins.
    """

    end_token_id: int
    begin_token_id: int | None = None


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the output must match; `text` is the source in the language of `kind`.

    `json_schema`, `choice` (a list of strings), `structural_tag` and `tool_calls` (a CallGrammar of
    tool_families.py) are JSON texts, `grammar` is EBNF or Lark, `json_object` needs no text.
    `whitespace` is a regular expression of what may
    stand between the parts of JSON; None is the back end's own.
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str | None = None
    thinking: ThinkingSpan | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one choice.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 0 (`repetition` 1)
    are off. `logit_bias` pairs token ids with what is added to their logits; `allowed_token_ids`
    empty allows all; `bad_words` are token sequences that never complete. `logprobs` is how many
    alternatives each output token comes with (0: itself alone; None: no log probabilities),
    `prompt_logprobs` the same for the prompt. The draw at output position p of
    choice c is a function of (seed, c, p) alone, so it survives batching, preemption and moving
    to another replica. `max_tokens` None is "up to the model's length". `skip_special_tokens`
    leaves special tokens out of the text. `seed_is_free`: nobody asked for this seed, so that
    another draw from the same distribution will do.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    seed_is_free: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None

"""What became of each request of a replay: answered once, or refused once.

Plain rows in order of completion, about 250 bytes each; what they mean together is in sim/report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Refusal = Literal["limited", "shed", "no_replica", "too_long"]
"""`limited`: by its tenant's limits, before any placement."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One answered request.

    `num_blocks` are the full blocks of its prompt, `num_hit_blocks` those found cached;
    `num_hit_tokens` the tokens they save. Times are None in the mode without a clock: `queue_s`
    from arrival until the engine starts on it, `prefill_s` from there to the first token.
    """

    number: int
    line: int
    at_s: float
    tenant: str
    replica: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_hit_blocks: int
    num_hit_tokens: int
    num_predicted_tokens: int
    num_attempts: int = 1
    queue_s: float | None = None
    prefill_s: float | None = None
    total_s: float | None = None

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.num_prompt_tokens - self.num_hit_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        if self.queue_s is None or self.prefill_s is None:
            return None
        return self.queue_s + self.prefill_s


class TurnedAway(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request that was not served."""

    number: int
    line: int
    at_s: float
    tenant: str
    why: Refusal


@dataclass(slots=True)
class Outcomes:
    """Everything that a replay produced; engine totals are over all replicas."""

    answers: list[Answer] = field(default_factory=list)
    refused: list[TurnedAway] = field(default_factory=list)
    num_arrivals: int = 0
    num_retries: int = 0
    num_gaps: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0
    num_duplicate_blocks: int = 0
    num_cached_blocks: int = 0
    duration_s: float | None = None
    has_prefix: bool = True

    def count_cached(self, held: Sequence[set[bytes]]) -> None:
        """Count what each replica holds at the end, and what of it another one holds too."""
        self.num_cached_blocks = sum(map(len, held))
        self.num_duplicate_blocks = self.num_cached_blocks - len(set().union(*held))

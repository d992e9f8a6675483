"""The seam to whatever guesses tokens, for the runner to verify in its next step.

A guess is never more than that: what a request outputs is decided by the model alone.
Implementations: n-grams of the request's own text (ngram.py), draft models and heads
(worker.spec_decode).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.frontend.sampling_params import SamplingParams


class DraftContext(NamedTuple):
    """A running request to guess for.

    `token_ids`: all its known tokens, int32, valid during the call only. `num_prompt_tokens` of
    them are the prompt. `max_drafts`: at most so many guesses, one or more.
    """

    request_id: str
    token_ids: memoryview
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int
    max_drafts: int


class Proposer(Protocol):
    """Guesses what follows the known tokens of requests."""

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        """Return guesses by request id, the next token first; none for who has no good one."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that runs no more; unknown ids are ignored."""
        ...

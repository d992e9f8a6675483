"""What an offline batch returns: the choices of each prompt, and what it cost.

It knows how results are put together from finished jobs, and nothing of how those ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.output_fold import FoldFinishReason
from worker.offline_batch import Job


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `stop_reason` names the stop string or stop token that ended it."""

    text: str
    token_ids: list[int]
    finish_reason: FoldFinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = []


class PromptResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt; `text` and what stands beside it are those of its first choice.

    `num_cached_tokens` of the prompt were not computed, because their blocks were cached.
    `prompt_logprobs` have an entry for every token but the first, if they were asked for.
    """

    prompt_token_ids: list[int]
    choices: list[Generated]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FoldFinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the first choice's tokens, if they were asked for."""
        return self.choices[0].logprobs


def result_of(jobs: Sequence[Job]) -> PromptResult:
    """Put the choices of one prompt together."""
    first = jobs[0]
    choices = []
    for job in jobs:
        fold = job.fold
        assert fold.finish_reason is not None, f"{job.request.request_id} has not ended"
        choices.append(
            Generated(
                text=fold.text,
                token_ids=fold.token_ids,
                finish_reason=fold.finish_reason,
                stop_reason=fold.stop_reason,
                logprobs=fold.logprobs,
            )
        )
    return PromptResult(
        prompt_token_ids=first.request.prompt_token_ids,
        choices=choices,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
    )

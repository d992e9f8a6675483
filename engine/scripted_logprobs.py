"""Log probabilities that a model-free executor states: made up, but the same every time.

They are functions of the token alone, so that they survive batching, preemption and caching.
"""

from __future__ import annotations

from engine.frontend.logprobs import TokenLogprobs
from engine.output import SchedulerOutput
from engine.runner_state import RunningRequest


def scripted_logprobs(token_id: int, num_top: int, *, vocab_size: int) -> TokenLogprobs:
    """Return the entry of a token of rank 1 to 4, beside the `num_top` likeliest ones.

    The token of rank r has a log probability of -r; three tokens before it stand for the rest.
    """
    rank = token_id % 4 + 1
    top = [((token_id + k + 1 - rank) % vocab_size, -float(k + 1)) for k in range(num_top)]
    return TokenLogprobs(token_id, -float(rank), rank, top)


def scripted_prompt_logprobs(
    request: RunningRequest, step: SchedulerOutput, *, vocab_size: int
) -> list[TokenLogprobs]:
    """Return the entries of the prompt tokens that a step's tokens of a request predict."""
    num_top = request.source.sampling.prompt_logprobs
    if num_top is None:
        return []
    start = step.num_computed_tokens[request.source.request_id]
    predicted = request.token_ids[start + 1 : request.num_computed_tokens + 1]
    prompt = predicted[: max(0, request.num_prompt_tokens - start - 1)]
    return [scripted_logprobs(token, num_top, vocab_size=vocab_size) for token in prompt]

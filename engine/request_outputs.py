"""What a client is told of its request after a step: new tokens, or why there are no more.

It says what the scheduler has decided, and decides nothing.
"""

from __future__ import annotations

import logging

from engine.frontend.logprobs import TokenLogprobs
from engine.messages import EngineOutput, FinishReason
from engine.request import Request

_log = logging.getLogger("prefixfleet.engine.scheduler")


def tokens_output(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs],
    *,
    finish_reason: FinishReason | None,
    stop_token_id: int | None,
) -> EngineOutput:
    """Tell new tokens; the first time also what was cached and what the prompt scored."""
    is_first, request.cached_reported = not request.cached_reported, True
    asks = request.source.sampling.prompt_logprobs is not None
    if finish_reason is not None and request.num_drafted:
        _log.debug(
            "guesses request_id=%s verified=%d accepted=%d",
            request.request_id,
            request.num_drafted,
            request.num_accepted,
        )
    return EngineOutput(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=request.num_cached_tokens if is_first else None,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if asks and is_first else None,
    )


def failed_output(request: Request, error: str) -> EngineOutput:
    """Tell why the runner could not go on with a request."""
    return EngineOutput(
        request_id=request.request_id,
        finish_reason="error",
        error=error,
        error_kind="internal",
    )


def too_long_output(request: Request, max_model_len: int) -> EngineOutput:
    """Tell that the pool cannot hold a request any more: its end, or an error without output."""
    if request.num_output_tokens:
        return EngineOutput(request_id=request.request_id, finish_reason="length")
    return EngineOutput(
        request_id=request.request_id,
        finish_reason="error",
        error=f"the KV cache shrank: {request.num_tokens} tokens do not fit any more, only "
        f"{max_model_len - 1} do",
        error_kind="overloaded",
    )

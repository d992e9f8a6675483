"""What an engine refuses before it becomes work: lengths, token ids and options that cannot be.

Pure checks of a request against the model's limits; whether there is room now is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import msgspec

from engine.frontend.errors import RequestError
from engine.messages import EngineRequest


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What every request must keep to.

    `takes_open_prompts` is False for models with layers that see the whole prompt at once.
    """

    max_model_len: int
    vocab_size: int
    takes_open_prompts: bool

    def check_request(self, source: EngineRequest) -> None:
        """Raise RequestError, naming the field, when a request can never be served."""
        if not source.prompt_token_ids:
            raise RequestError("invalid_request", "the prompt has no tokens", param="prompt")
        if source.prompt_is_open and not self.takes_open_prompts:
            raise RequestError(
                "invalid_request",
                "this model has layers that see the whole prompt; send it in one piece",
                param="prompt",
            )
        self.check_length(len(source.prompt_token_ids) + len(source.resume_token_ids))
        self.check_token_ids("prompt", source.prompt_token_ids)
        self.check_token_ids("resume_token_ids", source.resume_token_ids)
        sampling = source.sampling
        self.check_token_ids("stop_token_ids", sampling.stop_token_ids)
        self.check_token_ids("allowed_token_ids", sampling.allowed_token_ids)
        self.check_token_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias))
        self.check_token_ids("bad_words", chain.from_iterable(sampling.bad_words))

    def check_length(self, num_tokens: int) -> None:
        """Raise RequestError when so many tokens leave no room for an answer."""
        if num_tokens >= self.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_tokens} tokens; at most {self.max_model_len - 1} leave room "
                f"for an answer (context length {self.max_model_len})",
                param="prompt",
            )

    def check_token_ids(self, param: str, token_ids: Iterable[int]) -> None:
        """Raise RequestError when a token is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    "invalid_request",
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}",
                    param=param,
                )

"""From a checked request to the sampling parameters of its choices.

Here are the checks that need the model: its context length and its vocabulary. It draws no
seeds; whoever calls brings one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.frontend.encoder import Encoder
from engine.frontend.errors import RequestError, invalid_value
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest
from engine.frontend.response_format import grammar_of
from engine.frontend.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat completions run to the model's limit."""

_SEED_MASK = 2**63 - 1


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    seed: int,
    encoder: Encoder,
) -> SamplingParams:
    """Resolve how one prompt's choices are sampled; `seed` holds unless the client sent its own.

    Raises RequestError: `context_length_exceeded`, or `invalid_request` for a token that the model
    does not have. `encoder` reads the words of `bad_words`. A seed is folded into
    63 bits, which every random generator accepts.
    """
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size=vocab_size, param="stop_token_ids")
    allowed = tuple(request.allowed_token_ids or ())
    check_token_ids(allowed, vocab_size=vocab_size, param="allowed_token_ids")
    max_tokens = resolve_max_tokens(
        requested_max_tokens(request),
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
    )
    if request.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"must be at most max_tokens={max_tokens}")
    top_k = request.top_k if request.top_k is not None else 0
    grammar = grammar_of(request)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(top_k, 0),
        seed=(seed if request.seed is None else request.seed) & _SEED_MASK,
        seed_is_free=request.seed is None,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias, vocab_size=vocab_size),
        allowed_token_ids=allowed,
        bad_words=bad_word_ids(request.bad_words or (), encoder),
        logprobs=request.num_logprobs,
        prompt_logprobs=num_prompt_logprobs(request),
        skip_special_tokens=request.skip_special_tokens,
        grammar=grammar.spec if grammar is not None else None,
    )


def bad_word_ids(words: Iterable[str], encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell words, at the start of a text and behind a space.

    A word that is spelled with other tokens is not recognised (nor is it by vLLM).
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            spellings[tuple(encoder.encode(text, add_special_tokens=False))] = None
    return tuple(spelling for spelling in spellings if spelling)


def _logit_bias(
    given: Mapping[str, float] | None, *, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    pairs = tuple((int(key), bias) for key, bias in (given or {}).items())
    for token_id, _ in pairs:
        if token_id >= vocab_size:
            raise _no_token(f"logit_bias.{token_id}", token_id, vocab_size)
    return pairs


def num_prompt_logprobs(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Return how many alternatives each token of the prompt comes with, None: no scores at all.

    They are asked for by themselves, or as a part of an echo.
    """
    asked = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        asked.append(request.logprobs)
    return max((count for count in asked if count is not None), default=None)


def requested_max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Return the limit that the client asked for or that its endpoint implies."""
    if isinstance(request, ChatCompletionRequest):
        return request.max_completion_tokens or request.max_tokens
    if request.max_tokens is None:
        return COMPLETION_MAX_TOKENS
    # Nothing but an echo still takes a step, whose token is not shown.
    return max(request.max_tokens, 1)


def resolve_max_tokens(
    requested: int | None, *, num_prompt_tokens: int, max_model_len: int, param: str
) -> int:
    """Return how many tokens may be generated; raise `context_length_exceeded` if none fit.

    `param` names the field of the prompt.
    """
    room = max_model_len - num_prompt_tokens
    if room <= 0 or (requested is not None and requested > room):
        wanted = f" and {requested} more were asked for" if requested is not None else ""
        raise RequestError(
            "context_length_exceeded",
            f"this model's context length is {max_model_len} tokens; the prompt has "
            f"{num_prompt_tokens}{wanted}; shorten the prompt or lower max_tokens",
            param="max_tokens" if room > 0 else param,
        )
    return room if requested is None else requested


def check_token_ids(token_ids: Iterable[int], *, vocab_size: int, param: str) -> None:
    """Raise RequestError naming the first token id that the model does not have."""
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise _no_token(f"{param}[{i}]", token_id, vocab_size)


def _no_token(param: str, token_id: int, vocab_size: int) -> RequestError:
    return invalid_value(param, f"token id {token_id} is not in 0 to {vocab_size - 1}")

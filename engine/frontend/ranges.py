"""The values that a request's fields may have, as far as that needs no model.

Shapes and unknown fields are parse.py's business; token ids and lengths are params.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.openai import GenerationRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 100
MAX_REPETITION_PENALTY = 10

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_AT_LEAST: Mapping[str, int] = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "stream_interval": 1,
}
_BETWEEN: Mapping[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def check_ranges(request: GenerationRequest) -> None:
    """Raise RequestError naming the first field whose value is out of range."""
    _check_numbers(request)
    _check_stop(request)
    _check_logit_bias(request)
    _check_bad_words(request)


def check_num_logprobs(param: str, count: int | None) -> None:
    """Raise RequestError naming the field that asks for too many alternatives."""
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise _invalid(param, f"must be between 0 and {MAX_LOGPROBS}, got {count}")


def _check_numbers(request: GenerationRequest) -> None:
    for name, low in _AT_LEAST.items():
        value = getattr(request, name, None)
        if name == "max_tokens" and getattr(request, "is_echo_only", False):
            continue
        if value is not None and value < low:
            raise _invalid(name, f"must be at least {low}, got {value}")
    for name, (low, high) in _BETWEEN.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise _invalid(name, f"must be between {low} and {high}, got {value}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _invalid("top_p", f"must be above 0 and at most 1, got {request.top_p}")
    if not 0 < request.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise _invalid(
            "repetition_penalty",
            f"must be above 0 and at most {MAX_REPETITION_PENALTY}, "
            f"got {request.repetition_penalty}",
        )
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != -1 and kept < 1:
        raise _invalid("truncate_prompt_tokens", f"must be at least 1, or -1, got {kept}")
    limit = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if limit is not None and request.min_tokens > limit:
        raise _invalid("min_tokens", f"must be at most max_tokens={limit}")


def _check_stop(request: GenerationRequest) -> None:
    strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for i, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            param = "stop" if isinstance(request.stop, str) else f"stop[{i}]"
            raise _invalid(param, f"must have 1 to {MAX_STOP_CHARS} characters")


def _check_logit_bias(request: GenerationRequest) -> None:
    for key, bias in (request.logit_bias or {}).items():
        # One spelling per token, so that no token is biased twice.
        if not _TOKEN_ID.fullmatch(key):
            raise _invalid(f"logit_bias.{key}", "is not a token id")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise _invalid(
                f"logit_bias.{key}",
                f"must be between {-MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}, got {bias}",
            )


def _check_bad_words(request: GenerationRequest) -> None:
    words = request.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise _invalid("bad_words", f"may hold at most {MAX_BAD_WORDS} words, got {len(words)}")
    for i, word in enumerate(words):
        if not (word.strip() and len(word) <= MAX_BAD_WORD_CHARS):
            raise _invalid(f"bad_words[{i}]", f"must have 1 to {MAX_BAD_WORD_CHARS} characters")

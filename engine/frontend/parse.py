"""From the bytes of a body to a checked request, or to an error that names the field.

A field that would change the answer and that we cannot honour is refused, never ignored. A
field that changes nothing is accepted. It knows no HTTP; ranges that need the model (token ids,
context length) are checked in params.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_CACHE_SALT_CHARS = 1024

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "stream_interval",
    }
)
"""Fields that are accepted and have no effect on the answer."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Fields that change the answer and are not supported: only null and these values pass."""

_AT_LEAST: Mapping[str, int] = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
_BETWEEN: Mapping[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """Parse and check the body of a chat completion; raise RequestError naming the field."""
    request = _parse(body, ChatCompletionRequest)
    if not request.messages:
        raise _invalid("messages", "must hold at least one message")
    for i, message in enumerate(request.messages):
        if message.tool_calls:
            raise _invalid(f"messages[{i}].tool_calls", "is not supported here")
    return request


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Parse and check the body of a completion; raise RequestError naming the field."""
    request = _parse(body, CompletionRequest)
    _check_prompt(request)
    return request


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object; raise RequestError saying what is wrong."""
    if not body.strip():
        raise RequestError("invalid_request", "the body is empty; a JSON object is needed")
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise RequestError("invalid_request", f"the body is not valid JSON: {reason}") from None
    except RecursionError:
        raise RequestError("invalid_request", "the body is nested too deeply") from None
    if not isinstance(value, dict):
        found = "null" if value is None else type(value).__name__
        raise RequestError("invalid_request", f"the body must be a JSON object, got {found}")
    return value


def refuse_unsupported(fields: Mapping[str, Any], known: type[msgspec.Struct]) -> None:
    """Raise RequestError for the first field that we cannot honour or have never heard of."""
    names = known.__struct_fields__
    for name, value in fields.items():
        if name in names or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            nearest = difflib.get_close_matches(name, [*names, *NEUTRAL, *HARMLESS], 1)
            hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
            raise _invalid(name, f"is not a known field{hint}")
        if value is not None and not _is_neutral(value, NEUTRAL[name]):
            raise _invalid(name, "is not supported here; leave it out")


def convert(fields: Mapping[str, Any], kind: type[RequestT]) -> RequestT:
    """Convert the known, non-null fields; raise RequestError naming the first of a wrong type."""
    known = kind.__struct_fields__
    given = {name: fields[name] for name in known if fields.get(name) is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def invalid_field(error: msgspec.ValidationError) -> RequestError:
    """Turn msgspec's message and path into ours: `max_tokens: expected int, got str`."""
    reason, _, path = str(error).partition(" - at `")
    reason = reason.replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", reason)
    param = path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return _invalid(param, "is required")
    reason = reason.replace(", got", " but got")
    return _invalid(param, reason[:1].lower() + reason[1:]) if param else _invalid("body", reason)


def _parse(body: bytes, kind: type[RequestT]) -> RequestT:
    fields = parse_object(body)
    refuse_unsupported(fields, kind)
    request = convert(fields, kind)
    _check_ranges(request)
    _check_stop(request)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise _invalid("cache_salt", f"must have 1 to {MAX_CACHE_SALT_CHARS} characters")
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "needs `stream: true`")
    return request


def _check_ranges(request: GenerationRequest) -> None:
    for name, low in _AT_LEAST.items():
        value = getattr(request, name, None)
        if value is not None and value < low:
            raise _invalid(name, f"must be at least {low}, got {value}")
    for name, (low, high) in _BETWEEN.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise _invalid(name, f"must be between {low} and {high}, got {value}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _invalid("top_p", f"must be above 0 and at most 1, got {request.top_p}")
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


def _check_prompt(request: CompletionRequest) -> None:
    if request.prompt == []:
        raise _invalid("prompt", "must not be empty")
    if isinstance(request.prompt, list):
        first = type(request.prompt[0])
        for i, item in enumerate(request.prompt):
            if type(item) is not first:
                raise _invalid(f"prompt[{i}]", "mixes texts, token ids and lists of token ids")
    num_choices = len(request.prompts) * request.n
    if num_choices > MAX_CHOICES:
        raise _invalid("prompt", f"prompts times n may be at most {MAX_CHOICES}, got {num_choices}")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError("invalid_request", f"{param}: {problem}", param=param)

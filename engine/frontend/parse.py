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
from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from engine.frontend.ranges import MAX_CHOICES, check_num_logprobs, check_ranges
from engine.frontend.response_format import NamedGrammar, grammar_of
from engine.frontend.tool_choice import tool_use
from kvindex.foundation.text_forms import form_in_words

RequestT = TypeVar("RequestT", bound=GenerationRequest)
StructT = TypeVar("StructT", bound=msgspec.Struct)

MAX_CACHE_SALT_CHARS = 1024

HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
    }
)
"""Fields that are accepted and have no effect on the answer."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Fields that change the answer and are not supported: only null and these values pass.

Several come with these values in whatever the routers of the SGLang family forward.
"""


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """Parse and check the body of a chat completion; raise RequestError naming the field."""
    request, grammar = _parse(body, ChatCompletionRequest)
    if not request.messages:
        raise _invalid("messages", "must hold at least one message")
    use = tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    if use is not None and grammar is not None and not grammar.allows_tools:
        raise _invalid(grammar.param, "cannot be combined with tools")
    check_num_logprobs("top_logprobs", request.top_logprobs)
    if request.top_logprobs and not request.logprobs:
        raise _invalid("top_logprobs", "needs `logprobs: true`")
    return request


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Parse and check the body of a completion; raise RequestError naming the field."""
    request, _ = _parse(body, CompletionRequest)
    _check_prompt(request)
    check_num_logprobs("logprobs", request.logprobs)
    if request.best_of is not None and request.best_of != request.n:
        raise _invalid("best_of", f"must be n={request.n}: choices are not ranked here")
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


def parse_as(body: bytes, kind: type[StructT]) -> StructT:
    """Parse a body of a small endpoint, every field of which is read; raise RequestError."""
    try:
        return msgspec.convert(parse_object(body), kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


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


def convert(fields: Mapping[str, Any], kind: type[StructT]) -> StructT:
    """Convert the known, non-null fields; raise RequestError naming the first of a wrong type."""
    known = kind.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None and name in known}
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
    reason = form_in_words(reason) or reason.replace(", got", " but got")
    return _invalid(param, reason[:1].lower() + reason[1:]) if param else _invalid("body", reason)


def _parse(body: bytes, kind: type[RequestT]) -> tuple[RequestT, NamedGrammar | None]:
    fields = parse_object(body)
    refuse_unsupported(fields, kind)
    request = convert(fields, kind)
    check_ranges(request)
    grammar = grammar_of(request)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise _invalid("cache_salt", f"must have 1 to {MAX_CACHE_SALT_CHARS} characters")
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "needs `stream: true`")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise _invalid("stream_options.continuous_usage_stats", "needs `include_usage: true`")
    return request, grammar


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

"""OpenAI's Responses body, as the chat completion that answers it.

Nothing is stored, so a response cannot be continued by its id: the client sends the whole input. It
knows no HTTP; the fields that both endpoints share are checked as those of a chat completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.parse import convert, parse_object

_ONLY_CHAT = frozenset(
    {"messages", "max_tokens", "max_completion_tokens", "response_format", "stream_options", "n"}
    | {"logprobs", "reasoning_effort", "stop", "return_token_ids", "functions", "function_call"}
)
"""Fields of a chat completion that have another name here, or no place in the answer."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include_obfuscation": (False,),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Fields that need a store or change the answer: only null and these values pass."""

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_FORMATS = ("text", "json_object", "json_schema")
_LOGPROBS = "message.output_text.logprobs"
_PARAM_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was taken apart: `chat` is the body to answer, the rest is shown again.

    `wants_logprobs`: the text parts of the answer carry log probabilities.
    """

    chat: bytes
    stream: bool
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    parallel_tool_calls: bool
    reasoning_effort: str | None
    text_format: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    metadata: dict[str, str]
    user: str | None
    wants_logprobs: bool


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses: the fields read here; others are those of a chat completion."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """Take a body apart; raise RequestError naming the field that cannot be honoured."""
    fields = parse_object(body)
    _refuse(fields)
    known = convert(fields, ResponsesBody)
    text_format, verbosity = _text(known.text)
    effort = _reasoning(known.reasoning)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(known.tools or [])]
    wants_logprobs = _wants_logprobs(known)
    chat = {
        name: value
        for name, value in fields.items()
        if name not in ResponsesBody.__struct_fields__ and name not in _NEUTRAL
    }
    chat["model"], chat["messages"] = known.model, _messages(known)
    optional = {
        "stream": known.stream,
        "temperature": known.temperature,
        "top_p": known.top_p,
        "user": known.user,
        "max_completion_tokens": known.max_output_tokens,
        "tools": [tool["chat"] for tool in tools] or None,
        "tool_choice": _chat_tool_choice(known.tool_choice) if tools else None,
        "parallel_tool_calls": known.parallel_tool_calls if tools else None,
        "response_format": _response_format(text_format),
        "reasoning_effort": effort,
        "verbosity": verbosity,
        "logprobs": wants_logprobs or None,
        "top_logprobs": known.top_logprobs if wants_logprobs else None,
        "stream_options": {"include_usage": True} if known.stream else None,
    }
    chat |= {name: value for name, value in optional.items() if value is not None}
    return ResponsesRequest(
        chat=msgspec.json.encode(chat),
        stream=bool(known.stream),
        instructions=known.instructions,
        max_output_tokens=known.max_output_tokens,
        temperature=known.temperature,
        top_p=known.top_p,
        parallel_tool_calls=known.parallel_tool_calls is not False,
        reasoning_effort=effort,
        text_format=text_format,
        tool_choice=known.tool_choice or "auto",
        tools=[tool["shown"] for tool in tools],
        metadata=known.metadata or {},
        user=known.user,
        wants_logprobs=wants_logprobs,
    )


def as_responses_error(error: RequestError) -> RequestError:
    """Return an error about the chat completion in the names that the client used."""
    if error.param is None:
        return error
    root, dot, rest = error.param.partition(".")
    if root.startswith("messages"):
        shown = "input"
    elif root in _PARAM_NAMES:
        shown = _PARAM_NAMES[root] + dot + rest
    else:
        return error
    message = error.message.replace(error.param, shown, 1)
    return RequestError(error.kind, message, param=shown, retry_after_s=error.retry_after_s)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Tell whether a value is one of these, and of its type: 0 is not false here."""
    return any(type(value) is type(one) and value == one for one in neutral)


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _ONLY_CHAT:
            raise _invalid(name, "is not a field of responses")
        if name in _NEUTRAL and value is not None and not _is_one_of(value, _NEUTRAL[name]):
            why = "nothing is stored here: send the whole input, and leave it out"
            raise _invalid(name, "is not supported; " + why)


def _messages(known: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if known.instructions is not None:
        messages.append({"role": "system", "content": known.instructions})
    if isinstance(known.input, str):
        return [*messages, {"role": "user", "content": known.input}]
    if not known.input:
        raise _invalid("input", "must not be empty")
    for i, item in enumerate(known.input):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], param: str) -> None:
    """Append an item's message; calls of one turn become one message, as chat has them."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item, param)})
    elif kind == "function_call":
        call = {
            "id": _text_field(item, "call_id", param),
            "type": "function",
            "function": {
                "name": _text_field(item, "name", param),
                "arguments": _text_field(item, "arguments", param),
            },
        }
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        call_id = _text_field(item, "call_id", param)
        output = _parts(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind != "reasoning":  # What was thought before is no part of a later prompt.
        raise _invalid(f"{param}.type", f"{kind!r} items are not supported")


def _content(item: dict[str, Any], param: str) -> str:
    if not isinstance(item.get("role"), str):
        raise _invalid(f"{param}.role", "is required")
    return _parts(item.get("content"), f"{param}.content")


def _parts(content: object, param: str) -> str:
    """Join the texts of a content; parts of another kind are refused by place."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(param, "must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise _invalid(f"{param}[{i}].type", f"{kind!r} parts are not supported; text is")
        texts.append(_text_field(part, "text", f"{param}[{i}]"))
    return "\n".join(texts)


def _tool(tool: dict[str, Any], param: str) -> dict[str, dict[str, Any]]:
    if tool.get("type") != "function":
        raise _invalid(f"{param}.type", f"{tool.get('type')!r} is not supported; 'function' is")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    _text_field(tool, "name", param)
    shown = {"type": "function", "parameters": None, "strict": None, **function}
    return {"chat": {"type": "function", "function": function}, "shown": shown}


def _chat_tool_choice(choice: str | dict[str, Any] | None) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise _invalid("tool_choice.type", f"{choice.get('type')!r} is not supported")
    return {"type": "function", "function": {"name": _text_field(choice, "name", "tool_choice")}}


def _text(text: dict[str, Any] | None) -> tuple[dict[str, Any], object]:
    """Return the format of the text, and how verbose it is to be."""
    settings = text or {}
    for name in settings:
        if name not in ("format", "verbosity"):
            raise _invalid(f"text.{name}", "is not a known field")
    found = settings.get("format") or {"type": "text"}
    if not isinstance(found, dict) or found.get("type") not in _FORMATS:
        raise _invalid("text.format", "must have type text, json_object or json_schema")
    return found, settings.get("verbosity")


def _response_format(text_format: dict[str, Any]) -> dict[str, Any] | None:
    if text_format["type"] == "text":
        return None
    if text_format["type"] == "json_object":
        return {"type": "json_object"}
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _reasoning(reasoning: dict[str, Any] | None) -> str | None:
    settings = {name: value for name, value in (reasoning or {}).items() if value is not None}
    effort = settings.pop("effort", None)
    for name in settings:
        raise _invalid(f"reasoning.{name}", "is not supported here; leave it out")
    if effort is not None and not isinstance(effort, str):
        raise _invalid("reasoning.effort", "must be a string")
    return effort


def _wants_logprobs(known: ResponsesBody) -> bool:
    for i, name in enumerate(known.include or []):
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise _invalid(f"include[{i}]", f"{name!r} is not supported here")
    return _LOGPROBS in (known.include or [])


def _text_field(item: Mapping[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{param}.{name}", "must be a string" if name in item else "is required")
    return value

"""The messages of a chat as the turns that chat templates read.

Contents become one text, and the arguments of calls objects, as Hugging Face's templates want
them. It knows no template and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.openai import ChatMessage, SentToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
Turn = dict[str, Any]


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Return the turns of a conversation; RequestError names what is wrong with a message."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _turn(message: ChatMessage, param: str) -> Turn:
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise _invalid(f"{param}.role", f"{message.role!r} is not supported; use one of {known}")
    content = message.content
    if content is None and message.role != "assistant":
        raise _invalid(f"{param}.content", "is required")
    if isinstance(content, list):
        texts = [_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content)]
        content = "\n".join(texts)
    turn: Turn = {"role": message.role, "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if message.role != "assistant":
            raise _invalid(f"{param}.tool_calls", "only an assistant's message has calls")
        turn["tool_calls"] = [
            _call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _call(call: SentToolCall, param: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid(f"{param}.function.arguments", "must be the JSON text of an object")
    shown: dict[str, Any] = {"id": call.id} if call.id is not None else {}
    return {
        **shown,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _part_text(part: dict[str, Any], param: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise _invalid(f"{param}.type", f"{kind!r} parts are not supported; only 'text' is")
    if not isinstance(text, str):
        raise _invalid(f"{param}.text", "must be a string")
    return text

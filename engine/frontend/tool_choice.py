"""Tools that a chat may call, and whether it must: the request's side of tool calling.

From OpenAI's fields to checked functions, and to a grammar where a call is demanded. What calls
look like in a model's output is tool_families.py; how they are read is tool_calls.py.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from engine.frontend.errors import invalid_value as _invalid

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 128


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a client demands."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice` as an object."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be called; `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat may do with tools. `functions` are those that its output may call."""

    functions: list[FunctionTool]
    must_call: bool = False
    parallel: bool = True


def offered_tools(
    tools: list[dict[str, Any]] | None, choice: ToolChoice | None
) -> list[dict[str, Any]]:
    """Return the tools that the model is told of: none when it may not call any."""
    return [] if choice == "none" else tools or []


def tool_use(
    tools: list[dict[str, Any]] | None, choice: ToolChoice | None, *, parallel: bool
) -> ToolUse | None:
    """Check tools and the choice among them; None when nothing may be called.

    Raises RequestError naming what is wrong.
    """
    functions = _functions(tools or [])
    if choice == "none":
        return None
    if choice not in (None, "auto") and not functions:
        raise _invalid("tool_choice", "needs tools")
    if isinstance(choice, NamedToolChoice):
        wanted = [each for each in functions if each.name == choice.function.name]
        if not wanted:
            known = ", ".join(each.name for each in functions)
            raise _invalid(
                "tool_choice.function.name",
                f"{choice.function.name!r} is none of the tools: {known}",
            )
        return ToolUse(functions=wanted, must_call=True, parallel=False)
    if not functions:
        return None
    return ToolUse(functions=functions, must_call=choice == "required", parallel=parallel)


def _functions(tools: list[dict[str, Any]]) -> list[FunctionTool]:
    """Read the functions of tools; RequestError names what is wrong."""
    if len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"may hold at most {MAX_TOOLS}, got {len(tools)}")
    functions: list[FunctionTool] = []
    for i, tool in enumerate(tools):
        function = _function(tool, f"tools[{i}]")
        if any(function.name == other.name for other in functions):
            raise _invalid(f"tools[{i}].function.name", f"{function.name!r} is there twice")
        functions.append(function)
    return functions


def _function(tool: dict[str, Any], param: str) -> FunctionTool:
    if tool.get("type") != "function":
        raise _invalid(f"{param}.type", f"{tool.get('type')!r} is not supported; use 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _invalid(f"{param}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(
            f"{param}.function.name", "must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise _invalid(f"{param}.function.parameters", "must be a JSON schema, an object")
    return FunctionTool(name=name, parameters=parameters)

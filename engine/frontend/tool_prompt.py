"""Tools for a model whose chat template knows of none: told in words, in Hermes' form.

Turns in, turns out, before they are rendered. Which templates need it is prompt.py's to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.frontend.conversation import Turn

_TOOLS = """Functions that you may call:
<tools>
{signatures}
</tools>
To call one, write its name and arguments between these marks:
<tool_call>
{{"name": "...", "arguments": {{}}}}
</tool_call>"""


def turns_without_tools(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return turns that say everything about tools, calls and their results in their content."""
    said: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            result = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if said and said[-1]["role"] == "user" and said[-1].get("is_result"):
                said[-1]["content"] += "\n" + result
            else:
                said.append({"role": "user", "content": result, "is_result": True})
        elif "tool_calls" in turn:
            calls = [_call(call) for call in turn["tool_calls"]]
            content = "\n".join([turn["content"], *calls] if turn["content"] else calls)
            said.append({"role": turn["role"], "content": content})
        else:
            said.append(turn)
    if not tools:
        return said
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _TOOLS.format(signatures=signatures)
    if said and said[0]["role"] == "system":
        first = {**said[0], "content": f"{said[0]['content']}\n\n{words}"}
        return [first, *said[1:]]
    return [{"role": "system", "content": words}, *said]


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    shown = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"

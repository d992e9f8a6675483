"""How families of models write tool calls: the parser of each, and the grammar of a demanded call.

A registry by name. It knows the marks, and of a tokenizer only whether a mark is one token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from engine.frontend.tool_calls import HermesParser, Llama3JsonParser, MistralParser, ToolParser
from engine.frontend.tool_choice import FunctionTool, ToolUse

Part = str | int | dict[str, Any]
"""Of a grammar: a literal text, a token by its id, or a JSON schema."""


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output that is one call, or several if `many`: prefix, calls between separators, suffix.

    Every call is one of `calls`. `otherwise`: an answer that keeps to this schema will do as well.
    """

    calls: list[list[Part]]
    prefix: list[Part] = []
    separator: list[Part] = []
    suffix: list[Part] = []
    many: bool = False
    otherwise: dict[str, Any] | None = None


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write calls. `begin` and `end` enclose a call, `open` and `close` all of them.

    `in_template`: what tells this family by its chat template. `id_chars`: None takes OpenAI's form
    of ids.
    """

    parser: Callable[[Collection[str]], ToolParser]
    in_template: str
    arguments_key: str = "arguments"
    open: str = ""
    close: str = ""
    begin: str = ""
    end: str = ""
    separator: str = "\n"
    padding: str = ""
    id_chars: int | None = None

    def grammar(
        self,
        use: ToolUse,
        *,
        token_id: Callable[[str], int | None],
        otherwise: dict[str, Any] | None = None,
    ) -> CallGrammar:
        """Return the grammar of a demanded call; `token_id` finds marks that are one token."""

        def mark(text: str) -> list[Part]:
            found = token_id(text) if text else None
            return [text] if found is None and text else [] if found is None else [found]

        def call(function: FunctionTool) -> list[Part]:
            name = msgspec.json.encode(function.name).decode()
            head = f'{self.padding}{{"name": {name}, "{self.arguments_key}": '
            tail = "}" + self.padding
            return [*mark(self.begin), head, function.parameters, tail, *mark(self.end)]

        return CallGrammar(
            calls=[call(function) for function in use.functions],
            prefix=[*mark(self.open), *(["["] if self.open else [])],
            separator=[self.separator],
            suffix=[self.close] if self.close else [],
            many=use.parallel,
            otherwise=otherwise,
        )


TOOL_FAMILIES: dict[str, ToolFamily] = {
    "hermes": ToolFamily(
        parser=lambda names: HermesParser(),
        in_template="<tool_call>",
        begin="<tool_call>",
        end="</tool_call>",
        padding="\n",
    ),
    "mistral": ToolFamily(
        parser=lambda names: MistralParser(),
        in_template="[TOOL_CALLS]",
        open="[TOOL_CALLS]",
        close="]",
        separator=", ",
        id_chars=9,
    ),
    "llama3_json": ToolFamily(
        parser=Llama3JsonParser,
        in_template='"parameters": ',
        arguments_key="parameters",
        separator="; ",
    ),
}
"""By the name that `worker.tool_call_parser` may have; the first that a template shows is taken."""

DEFAULT_TOOL_FAMILY = "hermes"
"""For templates that show none: it is what we tell the model ourselves (tool_prompt.py)."""

"""What shape a client wants the output in: OpenAI's `response_format` and vLLM's fields.

From the fields of a request to one grammar, or to an error that names the field. Whether the
grammar can be compiled is the back end's to say; tools are tool_choice.py's business.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.sampling_params import GrammarKind, GrammarSpec


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named schema. The output always keeps to it, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's field; type `structural_tag`, with structures and triggers, is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: one of the kinds, and how much white space JSON may have.

    `json` and `structural_tag` are objects or their JSON texts.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class OutputFormatFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of chat completions and completions that rule the output.

    `guided_*` are older names of what `structured_outputs` holds.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class NamedGrammar(msgspec.Struct, frozen=True):
    """A grammar and the field that asked for it."""

    param: str
    spec: GrammarSpec

    @property
    def allows_tools(self) -> bool:
        """Whether an output may be a tool call instead: so it is with OpenAI's field for JSON."""
        is_json = self.spec.kind in ("json_schema", "json_object")
        return is_json and self.param.startswith("response_format")


_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def grammar_of(request: OutputFormatFields) -> NamedGrammar | None:
    """Return the grammar that a request asks for; RequestError when it asks for several."""
    asked = [*_response_format(request), *_structured_outputs(request), *_guided(request)]
    if len(asked) > 1:
        other = f"cannot be combined with {asked[0].param}"
        raise _invalid(asked[1].param, other)
    return asked[0] if asked else None


def _response_format(request: OutputFormatFields) -> list[NamedGrammar]:
    form = request.response_format
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [NamedGrammar("response_format", GrammarSpec("json_object"))]
    if form.type == "structural_tag":
        tag = {"structures": form.structures or [], "triggers": form.triggers or []}
        return [NamedGrammar("response_format", GrammarSpec("structural_tag", json.dumps(tag)))]
    param = "response_format.json_schema"
    if form.json_schema is None:
        raise _invalid(param, "is required with type json_schema")
    if form.json_schema.schema is None:
        raise _invalid(f"{param}.schema", "is required")
    text = json.dumps(form.json_schema.schema)
    return [NamedGrammar(f"{param}.schema", GrammarSpec("json_schema", text))]


def _structured_outputs(request: OutputFormatFields) -> list[NamedGrammar]:
    wanted = request.structured_outputs
    if wanted is None:
        return []
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    asked = [
        _named(f"structured_outputs.{name}", kind, getattr(wanted, name), whitespace)
        for name, kind in _STRUCTURED.items()
        if getattr(wanted, name) not in (None, False)
    ]
    if not asked:
        raise _invalid("structured_outputs", f"must hold one of {', '.join(_STRUCTURED)}")
    return asked


def _guided(request: OutputFormatFields) -> list[NamedGrammar]:
    whitespace = request.guided_whitespace_pattern
    return [
        _named(name, kind, getattr(request, name), whitespace)
        for name, kind in _GUIDED.items()
        if getattr(request, name) is not None
    ]


def _named(param: str, kind: GrammarKind, value: Any, whitespace: str | None) -> NamedGrammar:
    text = "" if value is True else value if isinstance(value, str) else json.dumps(value)
    is_json = kind in ("json_schema", "json_object")
    return NamedGrammar(param, GrammarSpec(kind, text, whitespace=whitespace if is_json else None))

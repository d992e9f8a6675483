"""Grammar specs as texts that llguidance compiles: JSON schemas and its dialect of Lark.

Nothing is compiled here, so nothing but the outer form is checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.frontend.sampling_params import GrammarSpec
from engine.frontend.tool_families import CallGrammar, Part
from engine.grammar import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

DEFAULT_WHITESPACE = r"\n[ \t]{0,40}| "
"""Between the parts of JSON: a space, or a new line and its indentation; so it cannot go on."""


def source_of(spec: GrammarSpec) -> str:
    """Return the source of a spec; GrammarError when it has not the form of its kind."""
    match spec.kind:
        case "json_schema":
            return json_source(_json(spec.text, (dict, bool)), whitespace=spec.whitespace)
        case "json_object":
            return json_source({"type": "object"}, whitespace=spec.whitespace)
        case "regex":
            source: str = LLMatcher.grammar_from_regex(spec.text)
            return source
        case "choice":
            return lark_source(_choice(_json(spec.text, (list,))))
        case "structural_tag":
            return lark_source(_structural_tag(_json(spec.text, (dict,))))
        case "tool_calls":
            return lark_source(_tool_calls(msgspec.json.decode(spec.text, type=CallGrammar)))
        case "grammar":
            return lark_source(_lark(spec.text))


def json_source(schema: Any, *, whitespace: str | None) -> str:
    """Return the source of a JSON schema."""
    options: JsonCompileOptions = {"whitespace_pattern": whitespace or DEFAULT_WHITESPACE}
    if whitespace == "":
        options = {"whitespace_flexible": False}
    try:
        source: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema cannot be read: {error}") from None
    return source


def lark_source(lark: str) -> str:
    """Return the source of a grammar in Lark."""
    source: str = LLMatcher.grammar_from_lark(lark)
    return source


def _tool_calls(grammar: CallGrammar) -> str:
    """Write an output of calls as Lark."""
    call = _alternatives([_sequence(parts) for parts in grammar.calls])
    separator = _sequence(grammar.separator)
    several = f"call ({separator} call)*" if grammar.many else "call"
    answer = f" | {_inline_json(grammar.otherwise)}" if grammar.otherwise is not None else ""
    return "\n".join(
        (
            "%llguidance {}",
            f"start: calls{answer}",
            f"calls: {_sequence(grammar.prefix)} {several} {_sequence(grammar.suffix)}",
            f"call: {call}",
        )
    )


def _alternatives(rules: Sequence[str]) -> str:
    return " | ".join(f"({rule})" for rule in rules)


def _sequence(parts: Sequence[Part]) -> str:
    written = []
    for part in parts:
        if isinstance(part, str):
            written.append(_literal(part))
        else:
            written.append(f"<[{part}]>" if isinstance(part, int) else _inline_json(part))
    return " ".join(written)


def _inline_json(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": DEFAULT_WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _lark(text: str) -> str:
    """Take a grammar in Lark, or in the EBNF of llama.cpp (GBNF)."""
    if "::=" not in text:
        return text
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - foreign code, which raises no class of its own
        raise GrammarError(f"not valid EBNF: {error}") from None
    return lark


def _choice(texts: Sequence[object]) -> str:
    if not texts or not all(isinstance(text, str) for text in texts):
        raise GrammarError("a choice is a list of at least one text")
    return "start: " + _alternatives([_literal(str(text)) for text in texts])


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]


def _structural_tag(fields: Any) -> str:
    """Write free text with tagged JSON in it as Lark.

    The form is vLLM's: `structures` of begin, schema and end; a trigger is a beginning of `begin`
    at which the text stops being free.
    """
    try:
        tag = msgspec.convert(fields, _StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(f"structural tag: {error}") from None
    if not tag.structures:
        raise GrammarError("structural tag: structures is empty")
    rules = ["start: (" + " | ".join(f"tag_{i}" for i in range(len(tag.structures))) + ")* TEXT"]
    rules.append(r"TEXT: /(.|\n)*/")
    for i, structure in enumerate(tag.structures):
        triggers = [each for each in tag.triggers if each and structure.begin.startswith(each)]
        if not triggers:
            raise GrammarError(f"structural tag: no trigger begins {structure.begin!r}")
        trigger = min(triggers, key=len)
        rest = structure.begin[len(trigger) :]
        body = _sequence([part for part in (rest, structure.schema, structure.end) if part != ""])
        rules.append(f"trigger_{i}[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag_{i}: trigger_{i} {body}")
    return "%llguidance {}\n" + "\n".join(rules)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(text: str, kinds: tuple[type, ...]) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from None
    if not isinstance(value, kinds):
        raise GrammarError(f"must be a JSON {kinds[0].__name__}, not {type(value).__name__}")
    return value

"""The reference of all settings as Markdown, read off the Structs that hold them.

A section becomes a heading, the Struct's docstring and a table: setting, type with its bounds,
default. It knows no section: the table {section: "module:Struct"} is an argument, and what a
setting means is what its Struct's docstring says.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from kvindex.foundation.config_loader import ENV_PREFIX, resolve_type
from kvindex.foundation.text_forms import words_of

_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
_NAMES = {
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.BoolType: "true or false",
    types.NoneType: "null",
    types.AnyType: "anything",
}


_PREAMBLE = f"""# Configuration

Every setting of the file that `-c FILE` names, as the code has it: `prefixfleet config reference`
prints this page. `prefixfleet config check -c FILE` validates a file, `prefixfleet config show`
prints what it comes to. What is left out keeps its default; an unknown name is an error.

Later ones win: defaults, the file, the environment (`{ENV_PREFIX}ROUTER__PORT=9000` sets
`router.port`), flags. Where a text is secret, `{{env: NAME}}` or `{{file: PATH}}` may stand for it.
[Operations](operations.md#settings-that-are-often-changed) has those that are often changed.
"""


def reference(sections: Mapping[str, str]) -> str:
    """Describe every setting of every section as a page of Markdown.

    Sections keep their order, a Struct that occurs twice is described once.
    """
    described: dict[type, str] = {}
    parts = [_PREAMBLE]
    for name, target in sections.items():
        root = types.type_info(resolve_type(target))
        for path, struct in _structs(name, root):
            parts.append(_section(path, struct, described))
    return "\n".join(parts)


def default_of(sections: Mapping[str, str], setting: str) -> str:
    """Return the default of the setting at `section.name`, as YAML writes it."""
    section, _, name = setting.partition(".")
    root = types.type_info(resolve_type(sections[section]))
    assert isinstance(root, types.StructType), f"{section} is a list"
    field = next(field for field in root.fields if field.name == name)
    return _default(field).strip("`")


def _structs(path: str, kind: types.Type) -> Iterator[tuple[str, types.StructType]]:
    """Yield every Struct below a type with the path at which it is written, parents first."""
    match kind:
        case types.StructType():
            yield path, kind
            for field in kind.fields:
                yield from _structs(f"{path}.{field.name}", field.type)
        case types.ListType() | types.VarTupleType():
            yield from _structs(f"{path}[]", kind.item_type)
        case types.DictType():
            yield from _structs(f"{path}.NAME", kind.value_type)
        case types.UnionType():
            for part in kind.types:
                yield from _structs(path, part)
        case types.Metadata():
            yield from _structs(path, kind.type)


def _section(path: str, struct: types.StructType, described: dict[type, str]) -> str:
    """Describe one Struct; where it occurs again, point at the first place."""
    level = "##" if "." not in path else "###"
    head = f"{level} `{path}`\n"
    if (first := described.setdefault(struct.cls, path)) != path:
        return f"{head}\nThe same settings as [`{first}`](#{_anchor(first)}).\n"
    rows = [f"| `{f.name}` | {_type(f.type)} | {_default(f)} |" for f in struct.fields]
    table = "\n".join(["| setting | type | default |", "|---|---|---|", *rows])
    return f"{head}\n{_prose(struct.cls)}\n\n{table}\n"


def _prose(cls: type) -> str:
    """Return a Struct's docstring in the terms of YAML."""
    return re.sub(r"\bNone\b", "`null`", inspect.cleandoc(cls.__doc__ or ""))


def _anchor(path: str) -> str:
    """Return the anchor that a heading gets: lower case, without punctuation."""
    return "".join(c for c in path.lower() if c.isalnum() or c in "-_")


def _type(kind: types.Type) -> str:
    """Name a type and its bounds in words."""
    match kind:
        case types.IntType() | types.FloatType():
            bounds = [f"{word} {getattr(kind, key):g}" for key, word in _BOUNDS if _has(kind, key)]
            return f"{_NAMES[type(kind)]} ({', '.join(bounds)})" if bounds else _NAMES[type(kind)]
        case types.StrType():
            return _cell(words_of(kind.pattern)) if kind.pattern else "text"
        case types.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case types.UnionType():
            return " or ".join(_type(part) for part in kind.types)
        case types.ListType() | types.VarTupleType():
            return f"list of {_type(kind.item_type)}"
        case types.DictType():
            return f"mapping of names to {_type(kind.value_type)}"
        case types.StructType():
            return "settings"
        case _:
            return _NAMES[type(kind)]


def _has(kind: types.Type, bound: str) -> bool:
    return getattr(kind, bound) is not None


def _default(field: types.Field) -> str:
    """Write a default as YAML does; a Struct of defaults is described under its own heading."""
    if field.required:
        return "must be given"
    value: Any = (
        field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    )
    if isinstance(value, msgspec.Struct):
        return "its own defaults"
    if isinstance(value, str) and value:
        return f"`{value}`"
    return f"`{json.dumps(msgspec.to_builtins(value))}`"


def _cell(text: str) -> str:
    """Keep a bar inside a cell from ending it."""
    return text.replace("|", "\\|")

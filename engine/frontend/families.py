"""Which families a model belongs to: by the names of its settings, else by its chat template."""

from __future__ import annotations

from engine.frontend.reasoning import REASONING_FAMILIES, ReasoningFamily
from engine.frontend.tool_families import DEFAULT_TOOL_FAMILY, TOOL_FAMILIES, ToolFamily
from kvindex.foundation.errors import ConfigError

_DEFAULT_REASONING = "qwen3"
"""For templates with its marks: it reads every output whose beginning shows whether it thinks."""


def check_families(*, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a name that is none; None is always right."""
    for setting, name, families in (
        ("tool_call_parser", tool_call_parser, list(TOOL_FAMILIES)),
        ("reasoning_parser", reasoning_parser, list(REASONING_FAMILIES)),
    ):
        if name is not None and name not in families:
            raise ConfigError(f"{setting} is {name!r}; use one of {', '.join(families)}")


def tool_family_of(template: str, name: str | None) -> ToolFamily:
    """Return the family of a name; without one, the first whose marks the template has."""
    if name is not None:
        return TOOL_FAMILIES[name]
    found = (family for family in TOOL_FAMILIES.values() if family.in_template in template)
    return next(found, TOOL_FAMILIES[DEFAULT_TOOL_FAMILY])


def reasoning_family_of(template: str, name: str | None) -> ReasoningFamily | None:
    """Return the family of a name; without one, that of a template with marks, if it has any."""
    if name is not None:
        return REASONING_FAMILIES[name]
    family = REASONING_FAMILIES[_DEFAULT_REASONING]
    return family if family.end in template else None

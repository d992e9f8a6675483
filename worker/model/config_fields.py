"""Typed reads from a config.json; every complaint names file and field. It knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvindex.foundation.errors import ConfigError


class ConfigFields:
    """The fields of one JSON object; `null` counts as absent."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; ConfigError when it is none, or absent without a default."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.path}: {name} is {value!r}, expected a positive integer")
        return value

    def integer_of(self, *names: str) -> int:
        """Return the positive integer that goes by one of `names`."""
        present = [name for name in names if self.raw.get(name) is not None]
        if not present:
            raise ConfigError(f"{self.path}: {' or '.join(names)} is missing")
        return self.integer(present[0])

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.path}: {name} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def refuse_unless(self, name: str, *allowed: object) -> None:
        """Raise ConfigError when a present field asks for what is not computed here."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            choices = ", ".join(map(repr, allowed)) or "none"
            raise ConfigError(f"{self.path}: {name}={value!r} is not supported, only {choices}")

"""The values of `prefixfleet replay …` flags that are more than a number or a name.

Each is read from text; what a replay makes of it is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.foundation.errors import ConfigError
from router.config import Limits
from sim.config import TenantTraffic

_PARAM = "param."
_TENANT_SETTINGS = (
    *(name for name in TenantTraffic.__struct_fields__ if name not in ("limits", "params")),
    *(name for name in Limits.__struct_fields__ if name != "soft_limit"),
)


def parse_params(words: Sequence[str], flag: str = "--param") -> dict[str, float]:
    """Read NAME=VALUE words; raise ConfigError for anything else."""
    params = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            params[name] = float(value)
        except ValueError:
            raise ConfigError(f"{flag} {word!r}: expected NAME=NUMBER") from None
        if not (name and equals):
            raise ConfigError(f"{flag} {word!r}: expected NAME=NUMBER")
    return params


def whole_numbers(text: str, flag: str) -> list[int]:
    """Read N,N,…; raise ConfigError unless all are at least 1."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text!r}: expected whole numbers from 1, such as 4,8")
    return numbers


def window_of(text: str | None) -> tuple[float, float] | None:
    """Read FROM:TO in seconds; raise ConfigError unless FROM is before TO."""
    if text is None:
        return None
    start, colon, end = text.partition(":")
    try:
        window = (float(start or 0), float(end or "inf"))
    except ValueError:
        window = (0.0, 0.0)
    if not colon or window[0] >= window[1]:
        raise ConfigError(f"--window {text!r}: expected FROM:TO in seconds, FROM before TO")
    return window


def tenant_of(text: str) -> tuple[str, dict[str, Any]]:
    """Read NAME:SETTING=VALUE,…; raise ConfigError naming what is wrong."""
    name, colon, rest = text.partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if equals and key.startswith(_PARAM):
            own = parse_params([part.removeprefix(_PARAM)], f"--tenant {text!r}:")
            values.setdefault("params", {}).update(own)
            continue
        if not equals or key not in _TENANT_SETTINGS:
            allowed = ", ".join((*_TENANT_SETTINGS, f"{_PARAM}NAME"))
            raise ConfigError(f"--tenant {text!r}: {part!r} is not one of {allowed} with =VALUE")
        found = value if key == "policy" else _number(value, f"--tenant {text!r}")
        if key in Limits.__struct_fields__:
            values.setdefault("limits", {})[key] = found
        else:
            values[key] = found
    if not (name and colon and values):
        raise ConfigError(f"--tenant {text!r}: expected NAME:scale=2,weight=1,…")
    return name, values


def _number(text: str, place: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{place}: {text!r} is not a number") from None
    return int(value) if value.is_integer() else value


def failure_of(text: str) -> dict[str, Any]:
    """Read REPLICA:AT:DOWN; raise ConfigError for anything else."""
    parts = text.split(":")
    try:
        replica, at_s, down_s = int(parts[0]), float(parts[1]), float(parts[2])
    except (ValueError, IndexError):
        raise ConfigError(f"--fail {text!r}: expected REPLICA:AT:DOWN, such as 0:60:30") from None
    return {"replica": replica, "at_s": at_s, "down_s": down_s}

"""Flags that several commands about tenants and keys share: limits, models, days.

They turn words into the fields of the admin API's bodies; what is allowed, the API says.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta
from typing import Any

from kvindex.foundation.arguments import CommandParser
from kvindex.foundation.errors import ConfigError

_LIMITS = {
    "requests_per_minute": "requests in any minute",
    "tokens_per_minute": "charged tokens in any minute",
    "max_parallel": "requests at a time",
    "tokens_per_day": "charged tokens in a day of UTC",
    "tokens_per_month": "charged tokens in a month of UTC",
}
_NONE = "none"


def add_limits(parser: CommandParser) -> None:
    """Add a flag for each limit; `none` takes one away."""
    for name, what in _LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, metavar="N", help=f"{what}; `{_NONE}` for no limit (at first: `{_NONE}`)"
        )


def add_models(parser: CommandParser) -> None:
    """Add the flag for an allow-list of models."""
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="a model that it may use, or `all`; may be repeated (at first: `all`)",
    )


def add_expiry(parser: CommandParser) -> None:
    """Add the flag for a key's last day; `end_of_day` reads it."""
    parser.add_argument(
        "--expires",
        metavar="DAY",
        help="last day of UTC that it works on, such as 2026-12-31 (default: works for ever)",
    )


def limits_of(flags: argparse.Namespace) -> dict[str, int | None]:
    """Return the limits that were given; ConfigError for what is no number."""
    given: dict[str, int | None] = {}
    for name in _LIMITS:
        text = getattr(flags, name)
        if text is not None:
            given[name] = None if text == _NONE else whole_number(name, text)
    return given


def models_of(flags: argparse.Namespace) -> list[str] | None:
    """Return the allow-list that was given; None allows all."""
    return None if flags.model == ["all"] else flags.model


def whole_number(name: str, text: str) -> int:
    """Read a positive number."""
    if not text.isdecimal() or int(text) == 0:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag}: a whole number above 0 or `{_NONE}`, not {text!r}")
    return int(text)


def end_of_day(flag: str, text: str) -> float:
    """Return the end (UTC) of a day such as 2026-12-31, in seconds since the Unix epoch."""
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(f"{flag}: a day such as 2026-12-31, not {text!r}") from None
    end = day + timedelta(days=1)
    if end <= datetime.now(UTC):
        raise ConfigError(f"{flag} {text}: that day is over")
    return end.timestamp()


def pairs_of(flag: str, words: list[str] | None) -> dict[str, str]:
    """Read words like `name=value`; ConfigError for others."""
    pairs: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            raise ConfigError(f"{flag}: NAME=VALUE, not {word!r}")
        pairs[name] = value
    return pairs


def number_or_text(text: str) -> Any:
    """Return a number where the text is one."""
    try:
        return float(text)
    except ValueError:
        return text

"""`prefixfleet tenant list | show | create | update | delete`, over the admin API.

Tenants that a configuration file declares are shown here and changed there.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from router.launch.inspect import admin_parser, admin_path, ask
from router.launch.key_command import TENANT_HELP, key_row
from router.launch.limit_flags import add_limits, add_models, limits_of, models_of, pairs_of
from router.launch.table import table


def list_(invocation: Invocation) -> int:
    """List the tenants."""
    parser = admin_parser(invocation, "List the tenants.")
    body = ask(invocation, parser, parser.read(), "/admin/tenants").body
    rows = [_row(tenant) for tenant in body["tenants"]]
    print(json.dumps(body["tenants"]) if invocation.as_json else table(rows))
    return 0


def show(invocation: Invocation) -> int:
    """Show one tenant and its keys."""
    parser = admin_parser(invocation, "Show one tenant, its settings and its keys.")
    parser.add_argument("name", help=TENANT_HELP)
    flags = parser.read()
    body = ask(invocation, parser, flags, admin_path("tenants", flags.name)).body
    _print(invocation, body)
    return 0


def create(invocation: Invocation) -> int:
    """Make a tenant."""
    parser = _settings_parser(
        invocation, "Make a tenant; give it keys with `key create`.", name="what to call it"
    )
    flags = parser.read()
    asked = {"name": flags.name, **_settings(flags)}
    body = ask(invocation, parser, flags, "/admin/tenants", method="POST", body=asked).body
    _print(invocation, body)
    return 0


def update(invocation: Invocation) -> int:
    """Change a tenant; what is not named stays."""
    parser = _settings_parser(
        invocation, "Change a tenant; what is not named stays.", name=TENANT_HELP
    )
    blocking = parser.add_mutually_exclusive_group()
    blocking.add_argument("--block", action="store_true", help="refuse all of its keys at once")
    blocking.add_argument("--unblock", action="store_true", help="serve it again")
    flags = parser.read()
    patch = _settings(flags)
    if flags.block or flags.unblock:
        patch["blocked"] = flags.block
    if not patch:
        raise ConfigError(f"tenant update: nothing to change; see `{parser.prog} --help`")
    path = admin_path("tenants", flags.name)
    _print(invocation, ask(invocation, parser, flags, path, method="PATCH", body=patch).body)
    return 0


def delete(invocation: Invocation) -> int:
    """Remove a tenant and all of its keys."""
    parser = admin_parser(invocation, "Remove a tenant and all of its keys.")
    parser.add_argument("name", help=TENANT_HELP)
    flags = parser.read()
    path = admin_path("tenants", flags.name)
    body = ask(invocation, parser, flags, path, method="DELETE").body
    print(json.dumps(body) if invocation.as_json else f"{flags.name}: deleted, with all its keys")
    return 0


def _settings_parser(invocation: Invocation, description: str, *, name: str) -> CommandParser:
    parser = admin_parser(invocation, description)
    parser.add_argument("name", help=name)
    add_models(parser)
    parser.add_argument(
        "--alias",
        action="append",
        metavar="NAME=MODEL",
        help="its own name for a model; may be repeated (at first: none)",
    )
    parser.add_argument(
        "--isolation",
        metavar="GROUP",
        help="`tenant`, `shared`, or a group to share caches with (at first: `tenant`)",
    )
    parser.add_argument(
        "--weight",
        type=float,
        metavar="X",
        help="its share beside others when replicas are scarce (at first: 1)",
    )
    add_limits(parser)
    return parser


def _settings(flags: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if flags.model is not None:
        settings["models"] = models_of(flags)
    if flags.alias is not None:
        settings["aliases"] = pairs_of("--alias", flags.alias)
    for name in ("isolation", "weight"):
        if getattr(flags, name) is not None:
            settings[name] = getattr(flags, name)
    limits = limits_of(flags)
    return settings | ({"limits": limits} if limits else {})


def _print(invocation: Invocation, body: dict[str, Any]) -> None:
    if invocation.as_json:
        print(json.dumps(body))
        return
    tenant = body["tenant"]
    rows = {name: value for name, value in tenant.items() if name not in ("keys", "limits")}
    rows |= {f"limits.{name}": value for name, value in tenant["limits"].items()}
    rows["declared"] = body["declared"]
    print(table([{"setting": name, "value": _text(value)} for name, value in rows.items()]))
    print()
    print(table([key_row(key) for key in body["keys"]]))


def _row(shown: dict[str, Any]) -> dict[str, object]:
    tenant, limits = shown["tenant"], shown["tenant"]["limits"]
    return {
        "name": tenant["name"],
        "declared": shown["declared"],
        "blocked": tenant["blocked"],
        "keys": len(shown["keys"]),
        "models": "all" if tenant["models"] is None else ",".join(tenant["models"]),
        "policy": tenant["policy"] or "default",
        "isolation": tenant["isolation"],
        "weight": tenant["weight"],
        "requests/min": limits["requests_per_minute"],
        "tokens/min": limits["tokens_per_minute"],
        "parallel": limits["max_parallel"],
        "tokens/day": limits["tokens_per_day"],
        "tokens/month": limits["tokens_per_month"],
    }


def _text(value: object) -> object:
    return json.dumps(value) if isinstance(value, (list, dict)) else value

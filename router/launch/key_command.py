"""`prefixfleet key list | create | block | unblock | rotate | delete`, over the admin API.

A key is printed once, by the command that made it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from router.launch.inspect import admin_parser, admin_path, ask
from router.launch.limit_flags import (
    add_expiry,
    add_limits,
    add_models,
    end_of_day,
    limits_of,
    models_of,
)
from router.launch.table import table

_MAX_GRACE_HOURS = 90 * 24
TENANT_HELP = "name of a tenant, see `prefixfleet tenant list`"


def list_(invocation: Invocation) -> int:
    """List the keys of one tenant, or of all."""
    parser = admin_parser(invocation, "List keys: alias, owner, expiry; never the keys themselves.")
    parser.add_argument("tenant", nargs="?", help="only those of one tenant (default: all)")
    flags = parser.read()
    tenants = ask(invocation, parser, flags, "/admin/tenants").body["tenants"]
    keys = [key for shown in tenants for key in shown["keys"]]
    if flags.tenant is not None:
        if flags.tenant not in [shown["tenant"]["name"] for shown in tenants]:
            raise ConfigError(f"there is no tenant {flags.tenant!r}; see `prefixfleet tenant list`")
        keys = [key for key in keys if key["tenant"] == flags.tenant]
    print(json.dumps(keys) if invocation.as_json else table([key_row(key) for key in keys]))
    return 0


def create(invocation: Invocation) -> int:
    """Make a key and print it."""
    parser = admin_parser(invocation, "Make a key and print it; it is not shown again.")
    parser.add_argument("tenant", help=TENANT_HELP)
    parser.add_argument("alias", help="what the key is called in bills and logs")
    parser.add_argument("--owner", metavar="TEXT", help="who has it (default: nobody is named)")
    add_expiry(parser)
    parser.add_argument(
        "--hash",
        metavar="HEX",
        help="take over a key that exists elsewhere, by its SHA-256 (default: make a new one)",
    )
    add_models(parser)
    add_limits(parser)
    flags = parser.read()
    asked: dict[str, Any] = {"alias": flags.alias}
    if flags.owner is not None:
        asked["owner"] = flags.owner
    if flags.expires is not None:
        asked["expires_at"] = end_of_day("--expires", flags.expires)
    if flags.hash is not None:
        asked["hash"] = flags.hash
    if flags.model is not None:
        asked["models"] = models_of(flags)
    limits = limits_of(flags)
    if limits:
        asked["limits"] = limits
    path = admin_path("tenants", flags.tenant, "keys")
    _print_made(invocation, ask(invocation, parser, flags, path, method="POST", body=asked).body)
    return 0


def block(invocation: Invocation) -> int:
    """Refuse a key from the next request on, on every gateway."""
    return _act(invocation, "block", "Refuse a key from the next request on, on every gateway.")


def unblock(invocation: Invocation) -> int:
    """Take a key again."""
    return _act(invocation, "unblock", "Take a blocked key again.")


def rotate(invocation: Invocation) -> int:
    """Make a new key in the place of an old one and print it."""
    parser = _key_parser(invocation, "Replace a key by a new one of the same rights, and print it.")
    parser.add_argument(
        "--grace-hours",
        type=float,
        default=24.0,
        metavar="HOURS",
        help=f"how long the old one still works, at most {_MAX_GRACE_HOURS}",
    )
    flags = parser.read()
    if not 0 <= flags.grace_hours <= _MAX_GRACE_HOURS:
        raise ConfigError(f"--grace-hours {flags.grace_hours:g}: from 0 to {_MAX_GRACE_HOURS}")
    path = admin_path("tenants", flags.tenant, "keys", flags.key, "rotate")
    asked = {"grace_s": flags.grace_hours * 3600}
    _print_made(invocation, ask(invocation, parser, flags, path, method="POST", body=asked).body)
    return 0


def delete(invocation: Invocation) -> int:
    """Remove a key."""
    parser = _key_parser(invocation, "Remove a key.")
    flags = parser.read()
    path = admin_path("tenants", flags.tenant, "keys", flags.key)
    body = ask(invocation, parser, flags, path, method="DELETE").body
    print(json.dumps(body) if invocation.as_json else f"{flags.tenant}: {flags.key} deleted")
    return 0


def key_row(key: dict[str, Any]) -> dict[str, object]:
    """Return what a table shows of a key."""
    return {
        "tenant": key["tenant"],
        "alias": key["alias"] or None,
        "id": key["id"],
        "owner": key["owner"] or None,
        "models": "all" if key["models"] is None else ",".join(key["models"]),
        "expires": end_of(key),
        "blocked": key["blocked"],
        "declared": key["declared"],
    }


def end_of(key: dict[str, Any]) -> str | None:
    """Return when a key ends, in UTC, None for never."""
    expires_at = key["expires_at"]
    if expires_at is None:
        return None
    return datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%d %H:%M")


def _act(invocation: Invocation, action: str, description: str) -> int:
    parser = _key_parser(invocation, description)
    flags = parser.read()
    path = admin_path("tenants", flags.tenant, "keys", flags.key, action)
    body = ask(invocation, parser, flags, path, method="POST").body
    done = "blocked" if body["blocked"] else "not blocked"
    print(json.dumps(body) if invocation.as_json else f"{flags.tenant}: {body['alias']} is {done}")
    return 0


def _key_parser(invocation: Invocation, description: str) -> CommandParser:
    parser = admin_parser(invocation, description)
    parser.add_argument("tenant", help=TENANT_HELP)
    parser.add_argument("key", help="its alias, or the beginning of its id")
    return parser


def _print_made(invocation: Invocation, body: dict[str, Any]) -> None:
    if invocation.as_json:
        print(json.dumps(body))
    elif body["key"] is None:
        print(f"{body['tenant']}: {body['alias']} taken over, id {body['id']}")
    else:
        print(f"{body['key']}\n(of {body['tenant']}, alias {body['alias']}; it is not shown again)")

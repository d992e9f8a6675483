"""`prefixfleet admin list | create | delete`: keys of the admin API, each with a role.

The fleet's own admin key, in the run directory, is none of these and cannot be removed.
"""

from __future__ import annotations

import json
from typing import Any

from kvindex.foundation.arguments import Invocation
from router.launch.inspect import admin_parser, admin_path, ask
from router.launch.key_command import end_of
from router.launch.limit_flags import add_expiry, end_of_day
from router.launch.table import table

_ROLES = ("admin", "viewer", "tenant-admin")


def list_(invocation: Invocation) -> int:
    """List the admin keys, never in clear."""
    parser = admin_parser(invocation, "List the admin keys and their roles.")
    admins = ask(invocation, parser, parser.read(), "/admin/admins").body["admins"]
    rows = [
        {name: admin[name] for name in ("alias", "role", "tenant")} | {"expires": end_of(admin)}
        for admin in admins
    ]
    print(json.dumps(admins) if invocation.as_json else table(rows))
    return 0


def create(invocation: Invocation) -> int:
    """Make an admin key and print it."""
    parser = admin_parser(invocation, "Make an admin key and print it; it is not shown again.")
    parser.add_argument("alias", help="what it is called in the audit log")
    parser.add_argument(
        "role",
        choices=_ROLES,
        metavar="ROLE",
        help="admin: everything; viewer: reads; tenant-admin: keys and usage of --tenant",
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        help="whose keys and usage (default: none; a tenant-admin needs it)",
    )
    add_expiry(parser)
    flags = parser.read()
    asked: dict[str, Any] = {"alias": flags.alias, "role": flags.role}
    if flags.tenant is not None:
        asked["tenant"] = flags.tenant
    if flags.expires is not None:
        asked["expires_at"] = end_of_day("--expires", flags.expires)
    body = ask(invocation, parser, flags, "/admin/admins", method="POST", body=asked).body
    if invocation.as_json:
        print(json.dumps(body))
    else:
        print(f"{body['key']}\n(alias {body['alias']}, {body['role']}; it is not shown again)")
    return 0


def delete(invocation: Invocation) -> int:
    """Remove an admin key."""
    parser = admin_parser(invocation, "Remove an admin key; it is refused at once everywhere.")
    parser.add_argument("alias", help="see `prefixfleet admin list`")
    flags = parser.read()
    path = admin_path("admins", flags.alias)
    body = ask(invocation, parser, flags, path, method="DELETE").body
    print(json.dumps(body) if invocation.as_json else f"{flags.alias}: deleted")
    return 0

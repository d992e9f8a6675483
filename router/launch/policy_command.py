"""`prefixfleet policy list | set | dry-run`: which policies there are, which one places whom."""

from __future__ import annotations

import json

from kvindex.foundation.arguments import CommandParser, Invocation
from router.launch.inspect import admin_parser, admin_path, ask
from router.launch.key_command import TENANT_HELP
from router.launch.limit_flags import number_or_text, pairs_of
from router.launch.table import table

# Two replays, each with a limit of its own at the gateway.
_DRY_RUN_S = 300.0


def list_(invocation: Invocation) -> int:
    """List the policies with their parameters, and the tenants that name them."""
    parser = admin_parser(invocation, "List the policies and the tenants that name them.")
    flags = parser.read()
    known = ask(invocation, parser, flags, "/admin/policies").body
    tenants = [
        shown["tenant"]
        for shown in ask(invocation, parser, flags, "/admin/tenants").body["tenants"]
    ]
    rows = []
    for policy in known["policies"]:
        name = policy["name"]
        bound = [tenant["name"] for tenant in tenants if tenant["policy"] == name]
        rows.append(
            {
                "policy": name,
                "default": name == known["default"],
                "parameters": ", ".join(policy["params"]) or None,
                "tenants": ", ".join(bound) or None,
            }
        )
    print(json.dumps(rows) if invocation.as_json else table(rows))
    return 0


def set_(invocation: Invocation) -> int:
    """Place a tenant by another policy from the next request on."""
    parser = _choice_parser(
        invocation,
        "Place a tenant by another policy, from its next request on.",
        policies="see `prefixfleet policy list`; `default` for the fleet's",
    )
    flags = parser.read()
    params = _params(flags.param)
    # A merge patch keeps what it does not name: parameters of the policy before must go.
    path = admin_path("tenants", flags.tenant)
    old = ask(invocation, parser, flags, path).body["tenant"]["policy_params"]
    patch = {
        "policy": None if flags.policy == "default" else flags.policy,
        "policy_params": dict.fromkeys(old) | params,
    }
    body = ask(invocation, parser, flags, path, method="PATCH", body=patch).body
    if invocation.as_json:
        print(json.dumps(body))
    else:
        print(f"{flags.tenant}: placed by {body['tenant']['policy'] or 'the default policy'}")
    return 0


def dry_run(invocation: Invocation) -> int:
    """Replay what the gateway has recorded, with a tenant's policy as it is and with another."""
    parser = _choice_parser(
        invocation,
        "Try a policy for a tenant on what was recorded.",
        policies="see `prefixfleet policy list`",
    )
    flags = parser.read()
    body = ask(
        invocation,
        parser,
        flags,
        admin_path("tenants", flags.tenant, "policy", "dry-run"),
        method="POST",
        body={"policy": flags.policy, "params": _params(flags.param)},
        timeout_s=_DRY_RUN_S,
    ).body
    if invocation.as_json:
        print(json.dumps(body))
        return 0
    now, then, fleet = body["now"], body["then"], body["fleet"]
    print(
        f"{body['requests']} requests of {flags.tenant}, {body['recorded_rows']} of all, on "
        f"{fleet['replicas']} replicas of {fleet['blocks']} blocks ({body['latency']})"
    )
    print(table([{"": name, "now": now[name], "then": then[name]} for name in now]))
    print("\n".join(body["sentences"]))
    return 0


def _choice_parser(invocation: Invocation, description: str, *, policies: str) -> CommandParser:
    parser = admin_parser(invocation, description)
    parser.add_argument("tenant", help=TENANT_HELP)
    parser.add_argument("policy", help=policies)
    parser.add_argument(
        "--param",
        action="append",
        metavar="NAME=VALUE",
        help="a parameter of it; may be repeated (default: its own defaults)",
    )
    return parser


def _params(words: list[str] | None) -> dict[str, object]:
    return {name: number_or_text(value) for name, value in pairs_of("--param", words).items()}

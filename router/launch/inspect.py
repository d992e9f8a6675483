"""Commands that look at a running fleet: its processes, their logs, the replicas.

They read fleet.json for addresses and the admin key, and ask the gateway's admin API; with
`--admin-url` and `--admin-key` they ask any gateway.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from kvindex.foundation.tls import Trust
from router.launch.down import find_run_dir, is_alive, pids, run_dir_parser
from router.launch.fleet_file import read_fleet_file, require_running
from router.launch.http_call import CALL_TIMEOUT_S, Answer, answers_ok, call
from router.launch.table import table

ADMIN_KEY_VARIABLE = "PREFIXFLEET_ADMIN_KEY"
_INVALID, _UNAUTHORIZED = 400, 401


def status(invocation: Invocation) -> int:
    """Show each process of a fleet; 0 when all serve, else 1."""
    parser = run_dir_parser(invocation, "Show the processes of a running fleet.")
    run_dir = find_run_dir(invocation, parser.overrides(parser.read()))
    fleet = require_running(run_dir)
    running = pids(fleet)
    urls = {replica.id: f"{replica.url}/health" for replica in fleet.replicas}
    urls["gateway"] = f"{fleet.admin_url}/ready"
    rows = []
    for name in fleet.logs:
        pid = running.get(name)
        alive = pid is not None and is_alive(pid)
        serves = alive and (name not in urls or answers_ok(urls[name], trust=fleet.trust))
        rows.append({"process": name, "pid": pid, "serves": serves, "log": fleet.logs[name]})
    _print(rows, invocation)
    return 0 if all(row["serves"] for row in rows) else 1


def logs(invocation: Invocation) -> int:
    """Print the last lines of one log, or where all logs are."""
    parser = run_dir_parser(invocation, "Print where the logs are, or the last lines of one.")
    parser.add_argument(
        "process", nargs="?", help="gateway, redis, replica-0, … (default: where all logs are)"
    )
    parser.add_argument("--lines", type=int, default=50, metavar="N", help="how many lines")
    flags = parser.read()
    if flags.lines < 1:
        raise ConfigError(f"--lines {flags.lines}: expected 1 or more")
    run_dir = find_run_dir(invocation, parser.overrides(flags))
    fleet = read_fleet_file(run_dir)
    if fleet is None:
        raise DependencyError(
            f"no fleet has run in {run_dir.path} yet; name its directory with --run-dir"
        )
    if flags.process is None:
        _print([{"process": name, "log": path} for name, path in fleet.logs.items()], invocation)
        return 0
    if flags.process not in fleet.logs:
        raise ConfigError(f"unknown process {flags.process!r}{nearest(flags.process, fleet.logs)}")
    try:
        text = Path(fleet.logs[flags.process]).read_text(errors="replace")
    except OSError as error:
        raise PrefixFleetError(f"{fleet.logs[flags.process]}: {error.strerror}") from None
    print("\n".join(text.splitlines()[-flags.lines :]))
    return 0


def replica_list(invocation: Invocation) -> int:
    """List the replicas as the gateway sees them."""
    parser = admin_parser(invocation, "List the replicas as the gateway sees them.")
    body = ask(invocation, parser, parser.read(), "/admin/replicas").body
    if invocation.as_json:
        print(json.dumps(body))
        return 0
    print(table([_replica_row(replica) for replica in body["replicas"]]))
    for refusal in body["refused"]:
        print(f"refused: {refusal['replica']} ({refusal['url']}): {refusal['reason']}")
    return 0


def replica_reset_cache(invocation: Invocation) -> int:
    """Make one replica forget its cached blocks; 1 when it cannot because requests run."""
    parser = admin_parser(invocation, "Make a replica forget its cached blocks.")
    parser.add_argument("id", help="replica id, see `prefixfleet replica list`")
    flags = parser.read()
    path = admin_path("replicas", flags.id, "reset_prefix_cache")
    answer = ask(invocation, parser, flags, path, method="POST")
    done = isinstance(answer.body, dict) and answer.body.get("success") is True
    if invocation.as_json:
        print(json.dumps(answer.body))
    else:
        print(f"{flags.id}: {'cache reset' if done else 'not reset, requests are running'}")
    return 0 if done else 1


def _replica_row(replica: dict[str, Any]) -> dict[str, object]:
    report, blocks = replica["report"], replica["num_blocks"]
    row = {name: replica[name] for name in ("id", "kind", "url", "live", "mode", "breaker")}
    return row | {
        "active": replica["num_active"],
        "running": report["num_running"],
        "waiting": report["num_waiting"],
        "blocks": sum(blocks.values()) if blocks else None,
        "reason": replica["reason"] or None,
    }


def admin_parser(invocation: Invocation, description: str) -> CommandParser:
    """Return a parser for commands that ask a gateway's admin API."""
    parser = run_dir_parser(invocation, description)
    group = parser.add_argument_group("a gateway elsewhere")
    group.add_argument("--admin-url", metavar="URL", help="its admin API (default: the fleet's)")
    group.add_argument(
        "--ca", metavar="FILE", help="authorities for an https URL (default: the system's)"
    )
    group.add_argument(
        "--admin-key", metavar="KEY", help=f"its key (default: the variable {ADMIN_KEY_VARIABLE})"
    )
    return parser


def admin_path(*words: str) -> str:
    """Return the path of something in the admin API; names may hold any character."""
    return "/".join(["/admin", *(quote(word, safe="") for word in words)])


def ask(
    invocation: Invocation,
    parser: CommandParser,
    flags: argparse.Namespace,
    path: str,
    *,
    method: str = "GET",
    body: object = None,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Answer:
    """Call the admin API; raise PrefixFleetError with its message unless it answers 200 or 201.

    ConfigError where what was asked for makes no sense, or the key is none.
    """
    if flags.admin_url is not None:
        url, key, trust = _elsewhere(flags)
    else:
        fleet = require_running(find_run_dir(invocation, parser.overrides(flags)))
        url, key, trust = fleet.admin_url, fleet.admin_key, fleet.trust
    answer = call(
        f"{url}{path}", key=key, method=method, body=body, timeout_s=timeout_s, trust=trust
    )
    if answer.status in (200, 201) and answer.body is not None:
        return answer
    reason = refusal(answer) or f"the admin API answered {answer.status}"
    if answer.status == _UNAUTHORIZED:
        raise ConfigError(f"{reason}: --admin-key, or the variable {ADMIN_KEY_VARIABLE}")
    raise ConfigError(reason) if answer.status == _INVALID else PrefixFleetError(reason)


def _elsewhere(flags: argparse.Namespace) -> tuple[str, str | None, Trust]:
    """Return URL, key and trust of the gateway that flags name; ConfigError when they are none."""
    url, key = flags.admin_url.rstrip("/"), flags.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--admin-url {url}: expected http://HOST:PORT or https://HOST:PORT")
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("--admin-key: a key has neither blanks nor letters beyond ASCII")
    return url, key, Trust(ca=flags.ca)


def refusal(answer: Answer) -> str | None:
    """Return the message of an answer that is an error in OpenAI's shape, None when it is not."""
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


def _print(rows: list[dict[str, Any]], invocation: Invocation) -> None:
    print(json.dumps(rows) if invocation.as_json else table(rows))

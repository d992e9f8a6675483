"""`prefixfleet index explain`: how much of a prompt each replica holds, and where it diverges.

The gateway does it, with its tokenizer and the tenant's salt; here it is asked and printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.errors import ConfigError
from router.launch.inspect import admin_parser, ask
from router.launch.table import table

_TEXT_WIDTH = 60


def explain(invocation: Invocation) -> int:
    """Explain a prompt given as text, as `-` (standard input), or as token ids."""
    parser = admin_parser(invocation, "Show how much of a prompt each replica holds.")
    parser.add_argument(
        "prompt", nargs="?", help="the text; - reads it from standard input (default: --ids)"
    )
    parser.add_argument(
        "--ids", metavar="N,N,…", help="token ids such as 12,7,99 (default: PROMPT)"
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose cache salt counts (default: the only one)"
    )
    parser.add_argument("--model", metavar="NAME", help="the served name (default: the only one)")
    parser.add_argument(
        "--cache-salt", metavar="TEXT", help="the salt that the client would send (default: none)"
    )
    flags = parser.read()
    wanted = {"prompt": _prompt(flags)}
    for field in ("tenant", "model", "cache_salt"):
        if getattr(flags, field) is not None:
            wanted[field] = getattr(flags, field)
    body = ask(invocation, parser, flags, "/admin/index/explain", method="POST", body=wanted).body
    if invocation.as_json:
        print(json.dumps(body))
        return 0
    print(
        f"{body['num_tokens']} tokens, {body['num_blocks']} full blocks of {body['block_size']}; "
        f"tenant {body['tenant']}, model {body['model']}"
    )
    print(table([_row(holding) for holding in body["targets"]]))
    return 0


def _prompt(flags: argparse.Namespace) -> str | list[int]:
    if (flags.prompt is None) == (flags.ids is None):
        raise ConfigError("give a prompt, or --ids with token ids")
    if flags.ids is None:
        return sys.stdin.read() if flags.prompt == "-" else str(flags.prompt)
    try:
        return [int(token) for token in flags.ids.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--ids {flags.ids}: token ids, such as 12,7,99") from None


def _row(holding: dict[str, Any]) -> dict[str, object]:
    text = holding["diverges_with"]
    return {
        "target": holding["target"],
        "mode": holding["mode"],
        "blocks": holding["matched_blocks"],
        "tokens": holding["matched_tokens"],
        "pending": holding["pending_blocks"],
        "diverges at token": holding["diverges_at_token"],
        "there": None if text is None else json.dumps(text, ensure_ascii=False)[:_TEXT_WIDTH],
    }

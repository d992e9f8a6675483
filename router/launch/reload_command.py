"""`prefixfleet reload`: have a running fleet take its changed configuration without a pause.

It asks the `up` that runs in the run directory and shows what that says; nothing is decided here.
"""

from __future__ import annotations

import json
import sys

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import DependencyError, PrefixFleetError
from router.launch.control import Failed, Reloaded, ReloadRequest, Said, ask_reload
from router.launch.down import find_run_dir, run_dir_parser
from router.launch.fleet_file import require_running


class ReloadFailedError(PrefixFleetError):
    """Raised with the words and the exit code of a reload that was refused or stopped."""

    kind = "reload_failed"

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.exit_code = failed.exit_code


def reload(invocation: Invocation) -> int:
    """Reload, showing what is done; raise what the fleet says when it refuses or stops."""
    parser = _parser(invocation)
    flags = parser.read()
    run_dir = find_run_dir(invocation, parser.overrides(flags))
    require_running(run_dir)
    file = invocation.config_file
    request = ReloadRequest(
        file=None if file is None else str(file.absolute()),
        overrides={} if flags.replicas is None else {"fleet.replicas": flags.replicas},
        dry_run=flags.dry_run,
    )
    try:
        for message in ask_reload(run_dir.control_socket, request):
            if isinstance(message, Failed):
                raise ReloadFailedError(message)
            if isinstance(message, Reloaded):
                _show(message, invocation)
                return 0
            _progress(message, invocation)
    except KeyboardInterrupt:
        print("prefixfleet: not waited for; the reload goes on", file=sys.stderr)
        raise
    raise DependencyError("the fleet ended before the reload did; see `prefixfleet logs`")


def _parser(invocation: Invocation) -> CommandParser:
    parser = run_dir_parser(
        invocation,
        "Have a running fleet take its changed configuration: what can change at once does, "
        "replicas and gateway processes that need a restart get it one by one.",
    )
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="how many to run (default: fleet.replicas)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    return parser


def _progress(message: Said, invocation: Invocation) -> None:
    print(message.text, file=sys.stderr if invocation.as_json else sys.stdout, flush=True)


def _show(end: Reloaded, invocation: Invocation) -> None:
    if invocation.as_json:
        print(json.dumps({"done": end.done, "steps": end.steps}))
    elif not end.steps:
        print("nothing has changed")
    else:
        print("reloaded" if end.done else "nothing was done (--dry-run)")

"""`prefixfleet down`: end the fleet of a run directory, and make sure that nothing is left of it.

It signals the supervisor, which drains; only what outlives that is killed from here.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import PrefixFleetError
from router.launch.config import FleetConfig, load_fleet_config
from router.launch.fleet_file import FleetFile, read_fleet_file
from router.launch.process_group import send_signal
from router.launch.run_dir import RunDirectory

_POLL_S = 0.05


def run_dir_parser(invocation: Invocation, description: str) -> CommandParser:
    """Return a parser that knows `--run-dir`, as every command about a running fleet does."""
    parser = CommandParser(invocation, description)
    parser.override(
        "--run-dir",
        "fleet.run_dir",
        group=parser.add_argument_group("which fleet"),
        metavar="DIR",
        help="its run directory",
    )
    return parser


def find_run_dir(invocation: Invocation, overrides: dict[str, object]) -> RunDirectory:
    """Return the run directory that flags, environment and configuration name."""
    config = load_fleet_config(invocation.config_file, overrides, demo=True)
    return RunDirectory(Path(config.section("fleet", FleetConfig).run_dir))


def down(invocation: Invocation) -> int:
    """Stop a fleet and wait until it is gone."""
    parser = run_dir_parser(invocation, "Stop the fleet of a run directory and wait for its end.")
    parser.add_argument(
        "--timeout", type=float, default=90.0, metavar="SECONDS", help="time to drain, then kill it"
    )
    flags = parser.read()
    run_dir = find_run_dir(invocation, parser.overrides(flags))
    pid = run_dir.owner_pid()
    if pid is None:
        print(f"no fleet runs in {run_dir.path}")
        return 0
    file = read_fleet_file(run_dir)
    send_signal(pid, signal.SIGTERM)
    if not _wait_gone(run_dir, flags.timeout):
        # Its children are tied to its life, so this ends all of them.
        send_signal(pid, signal.SIGKILL)
        _wait_gone(run_dir, 5.0)
        run_dir.remove_sockets()
    left = _left_over(file)
    if left:
        raise PrefixFleetError(f"still running: {', '.join(left)}; end them by hand")
    print(f"the fleet of {run_dir.path} (pid {pid}) is stopped")
    return 0


def _wait_gone(run_dir: RunDirectory, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while run_dir.owner_pid() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def pids(file: FleetFile) -> dict[str, int]:
    """Return the pids that a fleet file names, by process."""
    known = {replica.id: replica.pid for replica in file.replicas}
    known |= {**file.gateway.pids, "redis": file.redis.pid}
    return {name: pid for name, pid in known.items() if pid is not None}


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and has not ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _left_over(file: FleetFile | None) -> list[str]:
    if file is None:
        return []
    deadline = time.monotonic() + 5.0
    left = pids(file)
    while left and time.monotonic() < deadline:
        left = {name: pid for name, pid in left.items() if is_alive(pid)}
        if left:
            time.sleep(_POLL_S)
    return [f"{name} (pid {pid})" for name, pid in left.items()]

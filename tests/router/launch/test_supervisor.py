"""Children are kept running, given up when that is hopeless, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from router.launch.down import is_alive
from router.launch.process_group import Inherited
from router.launch.restart import RestartPolicy
from router.launch.supervisor import ChildFailedError, ChildSpec, Supervisor

FAST = RestartPolicy(initial_s=0.01, max_s=0.01, budget=3, window_s=60.0)
SERVE = "import pathlib, time; pathlib.Path(r'{ready}').touch(); time.sleep(60)"


class Watched:
    """A supervisor with what it reported."""

    def __init__(self, policy: RestartPolicy = FAST) -> None:
        self.pids: list[tuple[str, int | None]] = []
        self.said: list[str] = []
        self.supervisor = Supervisor(
            policy, on_pid=lambda name, pid: self.pids.append((name, pid)), say=self.said.append
        )

    def pid(self, name: str) -> int:
        return next(pid for n, pid in reversed(self.pids) if n == name and pid is not None)


def child(
    folder: Path, code: str, *, stop_timeout_s: float = 5.0, name: str = "child"
) -> ChildSpec:
    ready = folder / f"{name}.ready"
    return ChildSpec(
        name=name,
        argv=[sys.executable, "-S", "-c", code.format(ready=ready)],
        log_file=folder / f"{name}.log",
        probe=ready.exists,
        stop_timeout_s=stop_timeout_s,
    )


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        await asyncio.sleep(0.01)


async def test_a_killed_child_is_started_again_and_its_new_pid_is_told(tmp_path: Path) -> None:
    watched = Watched()
    watched.supervisor.start(child(tmp_path, SERVE))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    first = watched.pid("child")
    os.kill(first, signal.SIGKILL)
    await until(lambda: watched.pid("child") != first, "a new pid")
    assert any("was killed by SIGKILL; restart 1 of 3 in 0.01 s" in line for line in watched.said)
    await watched.supervisor.stop_all([["child"]])
    assert not is_alive(watched.pid("child"))
    assert watched.pids[-1] == ("child", None)


async def test_a_child_that_keeps_dying_fails_the_fleet_with_code_4(tmp_path: Path) -> None:
    watched = Watched()
    watched.supervisor.start(child(tmp_path, "raise SystemExit(1)"))
    with pytest.raises(ChildFailedError, match="used up its 3 restarts within 60 s") as caught:
        await watched.supervisor.wait_ready(["child"], timeout_s=10)
    assert caught.value.exit_code == 4
    assert len([pid for _, pid in watched.pids if pid is not None]) == 4
    await watched.supervisor.stop_all([])


@pytest.mark.parametrize("code", [2, 3])
async def test_what_trying_again_cannot_help_fails_at_once_with_its_own_words(
    code: int, tmp_path: Path
) -> None:
    watched = Watched()
    text = f"import sys; print('error: port 1 is in use', file=sys.stderr); sys.exit({code})"
    watched.supervisor.start(child(tmp_path, text))
    with pytest.raises(ChildFailedError, match=r"^port 1 is in use$") as caught:
        await watched.supervisor.wait_ready(["child"], timeout_s=10)
    assert caught.value.exit_code == code
    await watched.supervisor.stop_all([])


async def test_a_program_that_does_not_exist_fails_and_is_named(tmp_path: Path) -> None:
    watched = Watched(RestartPolicy(initial_s=0.01, max_s=0.01, budget=0, window_s=60.0))
    spec = ChildSpec(
        name="child",
        argv=["/nowhere/program"],
        log_file=tmp_path / "child.log",
        probe=lambda: False,
        stop_timeout_s=1,
    )
    watched.supervisor.start(spec)
    with pytest.raises(ChildFailedError, match="ended with exit code 1"):
        await watched.supervisor.wait_ready(["child"], timeout_s=10)
    assert "cannot run /nowhere/program" in spec.log_file.read_text()
    await watched.supervisor.stop_all([])


async def test_a_child_that_never_gets_ready_is_named_with_its_log(tmp_path: Path) -> None:
    watched = Watched()
    watched.supervisor.start(child(tmp_path, "import time; time.sleep(60)"))
    with pytest.raises(
        ChildFailedError, match=r"child is not ready after 0\.2 s; see .*child\.log"
    ):
        await watched.supervisor.wait_ready(["child"], timeout_s=0.2)
    await watched.supervisor.stop_all([])
    assert not is_alive(watched.pid("child"))


async def test_a_child_that_ignores_sigterm_is_killed_after_its_time(tmp_path: Path) -> None:
    watched = Watched()
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE
    watched.supervisor.start(child(tmp_path, code, stop_timeout_s=0.2))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    await watched.supervisor.stop(["child"])
    assert "child does not stop; killing it" in watched.said
    assert not is_alive(watched.pid("child"))


async def test_force_cuts_a_running_drain_short(tmp_path: Path) -> None:
    watched = Watched()
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE
    watched.supervisor.start(child(tmp_path, code, stop_timeout_s=60))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    stopping = asyncio.create_task(watched.supervisor.stop(["child"]))
    await asyncio.sleep(0)
    watched.supervisor.force()
    await asyncio.wait_for(stopping, 5)
    assert not is_alive(watched.pid("child"))


async def test_what_a_dead_child_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, pathlib; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"pathlib.Path(r'{note}').write_text(str(p.pid)); " + SERVE
    )
    watched = Watched()
    watched.supervisor.start(child(tmp_path, code))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    grandchild = int(note.read_text())
    os.kill(watched.pid("child"), signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{grandchild}").exists(), "grandchild dead and reaped")
    await watched.supervisor.stop_all([])


async def test_groups_end_one_after_the_other(tmp_path: Path) -> None:
    watched = Watched()
    for name in ("redis", "gateway"):
        watched.supervisor.start(child(tmp_path, SERVE, name=name))
    await watched.supervisor.wait_ready(["redis", "gateway"], timeout_s=10)
    await watched.supervisor.stop_all([["gateway"], ["redis"]])
    assert watched.pids[-2:] == [("gateway", None), ("redis", None)]


LEAVES_ON_USR1 = (
    "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); " + SERVE
)


def version(folder: Path, number: int, code: str) -> ChildSpec:
    """Describe the same child in another version, ready by a file of its own."""
    spec = child(folder, code, name=f"v{number}")
    return replace(spec, name="child", retire_signal=signal.SIGUSR1)


async def test_a_replaced_child_goes_on_until_its_successor_is_ready(tmp_path: Path) -> None:
    watched = Watched()
    watched.supervisor.start(version(tmp_path, 1, LEAVES_ON_USR1))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    old = watched.pid("child")
    await watched.supervisor.replace(version(tmp_path, 2, LEAVES_ON_USR1), timeout_s=10)
    assert watched.pid("child") != old
    await until(lambda: not is_alive(old), "the old one leaves by itself")
    assert watched.pids[-1] == ("child", watched.pid("child"))  # Its end is no news of the new one.
    await watched.supervisor.stop_all([["child"]])
    assert not is_alive(watched.pid("child"))


async def test_a_successor_that_does_not_get_ready_leaves_the_old_one_in_its_place(
    tmp_path: Path,
) -> None:
    watched = Watched()
    watched.supervisor.start(version(tmp_path, 1, SERVE))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    old = watched.pid("child")
    with pytest.raises(ChildFailedError, match=r"^no$"):
        await watched.supervisor.replace(
            version(tmp_path, 2, "import sys; print('error: no'); sys.exit(2)"), timeout_s=10
        )
    assert watched.pids[-1] == ("child", old)
    assert is_alive(old)
    await watched.supervisor.stop_all([])
    assert not is_alive(old)


async def test_one_that_is_still_leaving_ends_with_the_others(tmp_path: Path) -> None:
    stays = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); " + SERVE
    watched = Watched()
    watched.supervisor.start(version(tmp_path, 1, stays))
    await watched.supervisor.wait_ready(["child"], timeout_s=10)
    old = watched.pid("child")
    await watched.supervisor.replace(version(tmp_path, 2, stays), timeout_s=10)
    assert is_alive(old)
    await watched.supervisor.stop_all([])
    assert not is_alive(old)


async def test_a_child_that_is_not_needed_fails_alone_until_it_is(tmp_path: Path) -> None:
    watched = Watched()
    watched.supervisor.start(child(tmp_path, SERVE, name="other"))
    watched.supervisor.start(child(tmp_path, "raise SystemExit(2)"), is_needed=False)
    with pytest.raises(ChildFailedError):
        await watched.supervisor.wait_ready(["child"], timeout_s=10)
    await watched.supervisor.wait_ready(["other"], timeout_s=10)
    watched.supervisor.need("child")
    with pytest.raises(ChildFailedError):
        await watched.supervisor.wait_failure()
    await watched.supervisor.stop_all([])


async def test_a_child_inherits_what_is_handed_over_before_each_start(tmp_path: Path) -> None:
    note, number = tmp_path / "note", count(1)
    code = f"import sys, pathlib; pathlib.Path(r'{note}').write_text(sys.stdin.read()); " + SERVE
    ends: list[int] = []
    spec = replace(
        child(tmp_path, code),
        hand_over=lambda: Inherited(stdin=f"start {next(number)}".encode()),
        on_end=ends.append,
    )
    watched = Watched()
    watched.supervisor.start(spec)
    await until(lambda: note.exists() and note.read_text() == "start 1", "the first word")
    os.kill(watched.pid("child"), signal.SIGKILL)
    await until(lambda: note.read_text() == "start 2", "the second word")
    assert ends == [1]
    await watched.supervisor.stop_all([])

"""A wrapped child ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvindex.foundation import die_with_parent

PARENT = """
import signal, subprocess, sys, time
from kvindex.foundation.die_with_parent import wrap
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(wrap(sleeper, signal.SIGTERM))
print(child.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists on Linux only")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_of_a_killed_parent_ends_too(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.send_signal(how)
    parent.wait()
    deadline = time.monotonic() + 5
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlived its parent by 5 s"
        os.sched_yield()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = os.path.abspath(die_with_parent.__file__)
    return subprocess.run(
        [sys.executable, "-S", "-P", script, *arguments], capture_output=True, text=True
    )


def test_the_program_runs_with_its_arguments_and_exit_code() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    wrapped = die_with_parent.wrap([sys.executable, "-c", code, "a b", "--"], signal.SIGKILL)
    done = subprocess.run(wrapped, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("['a b', '--']\n", 7)


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    done = run("1", "9", "--", sys.executable, "-c", "print('started')")
    assert (done.stdout, done.stderr, done.returncode) == ("", "parent 1 is gone\n", 1)


def test_a_program_that_cannot_run_is_named() -> None:
    done = run(str(os.getpid()), "9", "--", "/nowhere/program")
    assert done.stderr == "cannot run /nowhere/program: No such file or directory\n"
    assert done.returncode == 1


def test_arguments_out_of_order_give_the_usage() -> None:
    assert run("1").stderr.startswith("usage: die_with_parent.py PARENT_PID SIGNAL")

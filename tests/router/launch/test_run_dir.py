"""A run directory is private, belongs to one fleet at a time, and keeps its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvindex.foundation.errors import ConfigError, DependencyError
from router.config import TenantConfig, TenantKey
from router.launch.fleet_file import (
    FleetFile,
    GatewayEntry,
    RedisEntry,
    ReplicaEntry,
    read_fleet_file,
    require_running,
    write_fleet_file,
)
from router.launch.run_dir import RunDirectory
from router.launch.secrets import load_or_create_secrets, provide_keys
from router.tenancy.tenants import hash_key


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def fleet_file() -> FleetFile:
    return FleetFile(
        url="http://127.0.0.1:8000",
        admin_url="http://127.0.0.1:8001",
        admin_key="k",
        keys={"acme": "sk-1"},
        model="m",
        model_folder="/m",
        dtype="float32",
        run_dir="/run",
        redis=RedisEntry(url="unix:///s", embedded=True),
        replicas=[ReplicaEntry(id="replica-0", url="http://127.0.0.1:8100")],
        gateway=GatewayEntry(),
        logs={},
    )


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folders_and_files_are_readable_by_their_owner_alone(run_dir: RunDirectory) -> None:
    load_or_create_secrets(run_dir)
    write_fleet_file(run_dir, fleet_file())
    assert mode(run_dir.path) == 0o700
    assert mode(run_dir.secrets_file) == 0o600
    assert mode(run_dir.fleet_file) == 0o600
    assert sorted(p.name for p in run_dir.path.iterdir() if p.is_file()) == [
        "fleet.json",
        "secrets.json",
    ]


def test_a_second_fleet_is_refused_and_told_what_to_do(run_dir: RunDirectory) -> None:
    run_dir.lock()
    assert run_dir.owner_pid() == os.getpid()
    with pytest.raises(DependencyError, match=rf"already runs in .* \(pid {os.getpid()}\); stop"):
        RunDirectory(run_dir.path).lock()
    run_dir.unlock()
    assert run_dir.owner_pid() is None
    RunDirectory(run_dir.path).lock()


def test_the_lock_of_a_dead_process_is_none(run_dir: RunDirectory) -> None:
    code = (
        "import os, pathlib, sys; from router.launch.run_dir import RunDirectory; "
        "RunDirectory(pathlib.Path(sys.argv[1])).lock(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run_dir.path)], check=False)
    assert (run_dir.path / "lock").read_text() != ""
    assert run_dir.owner_pid() is None
    run_dir.lock()


def test_secrets_are_made_once_and_reused(run_dir: RunDirectory) -> None:
    first = load_or_create_secrets(run_dir)
    assert load_or_create_secrets(RunDirectory(run_dir.path)) == first
    assert len({first.fleet_secret, first.internal_token, first.admin_key}) == 3
    assert all(len(value) >= 32 for value in msgspec.structs.astuple(first))


def test_damaged_secrets_are_named_with_the_remedy(run_dir: RunDirectory) -> None:
    run_dir.secrets_file.write_text("{")
    with pytest.raises(ConfigError, match=r"secrets\.json: .*; remove it"):
        load_or_create_secrets(run_dir)


def test_only_tenants_without_keys_are_given_one_and_a_known_key_is_kept() -> None:
    own = TenantConfig(name="own", keys=(TenantKey(hash="0" * 64),))
    anonymous = TenantConfig(name="open", anonymous=True)
    new, old = TenantConfig(name="new"), TenantConfig(name="old")
    tenants, keys = provide_keys([own, anonymous, new, old], {"old": "sk-old"})
    assert tenants[:2] == (own, anonymous)
    assert set(keys) == {"new", "old"}
    assert keys["old"] == "sk-old"
    assert [t.keys[0].hash for t in tenants[2:]] == [hash_key(keys["new"]), hash_key("sk-old")]


def test_a_fleet_file_comes_back_as_written_and_pids_follow_restarts(
    run_dir: RunDirectory,
) -> None:
    file = fleet_file()
    for process, pid in (("gateway", 1), ("redis", 2), ("replica-0", 3)):
        file.set_pid(process, pid)
    write_fleet_file(run_dir, file)
    read = read_fleet_file(run_dir)
    assert read is not None
    assert (read.gateway.pid, read.redis.pid, read.replicas[0].pid) == (1, 2, 3)
    file.clear()
    assert (file.gateway.pid, file.redis.pid, file.replicas[0].pid, file.ready) == (
        None,
        None,
        None,
        False,
    )


def test_a_fleet_that_does_not_run_is_not_found(run_dir: RunDirectory) -> None:
    write_fleet_file(run_dir, fleet_file())
    with pytest.raises(DependencyError, match=r"no fleet runs in .*; start one with"):
        require_running(run_dir)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use .*file/run as run directory: Not a dir"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_sockets_of_a_long_path_go_to_a_short_one(tmp_path: Path) -> None:
    short = RunDirectory(Path("/tmp/pf-run"))
    assert short.socket_dir == Path("/tmp/pf-run/sockets")
    deep = RunDirectory(tmp_path / ("x" * 90))
    assert len(str(deep.socket_dir / "r0" / "core-out.sock")) < 108
    assert deep.socket_dir != RunDirectory(tmp_path / ("y" * 90)).socket_dir


def test_logs_of_the_run_before_are_kept_once(run_dir: RunDirectory) -> None:
    run_dir.log_file("gateway").write_text("first")
    run_dir.rotate_logs()
    assert not run_dir.log_file("gateway").exists()
    assert (run_dir.path / "logs" / "gateway.log.1").read_text() == "first"

"""Usage files: every charged request is one whole line of one file, and finished files stay so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvindex.foundation.errors import ConfigError
from router.config import UsageFilesConfig
from router.tenancy.usage import UsageRecord
from router.tenancy.usage_files import UsageFiles
from tests.conditions import until
from tests.e2e.fleet_process import REPOSITORY
from tests.e2e.fleet_process import until as until_now
from tests.router.running_gateway import completion, gateway_spec, running_gateway


def record(number: int) -> UsageRecord:
    return UsageRecord(
        at=float(number),
        request_id=f"r{number:04d}",
        tenant="acme",
        key="ci",
        model="tiny",
        uncached_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        charged_tokens=2,
        queue_s=0.0,
        ttft_s=0.1,
        duration_s=0.2,
        status=200,
        outcome="ok",
    )


def finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem.rpartition("-")[2]))


def ids(file: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in file.read_text().splitlines()]


def num_open_lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.open"))


def test_files_are_finished_by_size_and_hold_every_record_once_and_in_order(tmp_path: Path) -> None:
    config = UsageFilesConfig(folder=str(tmp_path / "usage"), max_bytes=1000)
    files = UsageFiles(config, owner="gw")
    for i in range(100):
        files.write(record(i))
    files.close()
    written = finished(tmp_path / "usage")
    assert [id for file in written for id in ids(file)] == [f"r{i:04d}" for i in range(100)]
    assert all(0 < file.stat().st_size <= 1000 for file in written)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in written)
    assert not list((tmp_path / "usage").glob("*.open"))


def test_a_record_longer_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    files = UsageFiles(UsageFilesConfig(folder=str(tmp_path), max_bytes=10), owner="gw")
    for i in range(3):
        files.write(record(i))
    files.close()
    assert [ids(file) for file in finished(tmp_path)] == [["r0000"], ["r0001"], ["r0002"]]


async def test_a_file_is_finished_by_age_although_nothing_more_comes(tmp_path: Path) -> None:
    files = UsageFiles(UsageFilesConfig(folder=str(tmp_path), max_age_s=0.05), owner="gw")
    files.write(record(1))
    await until(lambda: finished(tmp_path))
    assert [ids(file) for file in finished(tmp_path)] == [["r0001"]]
    files.close()


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    config = UsageFilesConfig(folder=str(tmp_path))
    one, other = UsageFiles(config, owner="one"), UsageFiles(config, owner="other")
    for i in range(50):
        one.write(record(i))
        other.write(record(1000 + i))
    one.close()
    other.close()
    by_owner = {file.stem.split("-")[2]: ids(file) for file in tmp_path.glob("*.jsonl")}
    assert by_owner == {
        "one": [f"r{i:04d}" for i in range(50)],
        "other": [f"r{1000 + i:04d}" for i in range(50)],
    }


def test_what_a_killed_process_left_is_finished_without_its_torn_line(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from router.config import UsageFilesConfig\n"
        "from router.tenancy.usage_files import UsageFiles\n"
        "from tests.router.tenancy.test_usage_files import record\n"
        "files = UsageFiles(UsageFilesConfig(folder=sys.argv[1]), owner='dead')\n"
        "[files.write(record(i)) for i in range(5)]\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY)
    try:
        until_now(lambda: num_open_lines(tmp_path) == 5, "its lines are there")
        living = UsageFiles(UsageFilesConfig(folder=str(tmp_path)), owner="gw")
        living.close()
        assert finished(tmp_path) == []  # Its process lives.
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = tmp_path.glob("*.open")
    left.write_bytes(left.read_bytes() + b'{"at": 5.0, "reque')
    UsageFiles(UsageFilesConfig(folder=str(tmp_path)), owner="gw").close()
    assert [ids(file) for file in finished(tmp_path)] == [[f"r{i:04d}" for i in range(5)]]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"router\.usage_files\.folder: .*file/usage: Not a dir"):
        UsageFiles(UsageFilesConfig(folder=str(tmp_path / "file" / "usage")), owner="gw")


async def test_a_gateway_writes_what_its_tenants_are_charged(tmp_path: Path) -> None:
    spec = gateway_spec(usage_files=UsageFilesConfig(folder=str(tmp_path)))
    async with running_gateway(spec, replicas=1) as running:
        assert (await running.post("/v1/completions", completion("hello")))[0] == 200
        assert (await running.post("/v1/completions", completion("hello"), key="no"))[0] == 401
    (file,) = finished(tmp_path)
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["tenant"], line["key"], line["status"]) == ("acme", "ci", 200)
    assert line["charged_tokens"] == line["uncached_tokens"] + line["output_tokens"]

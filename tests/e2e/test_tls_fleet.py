"""A fleet of `prefixfleet up` whose gateway speaks TLS, as the person who runs it meets it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.certificates import Authority
from tests.e2e.fleet_process import FleetProcess, scripted_config, tiny_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    folder = tmp_path_factory.mktemp("tls")
    config = scripted_config(tiny_folder(folder / "model"))
    tls = Authority(folder).issue("fleet.example")
    config["router"]["tls"] = msgspec.to_builtins(tls)
    running = FleetProcess(folder, config).start()
    try:
        yield running
        assert running.stop() == 130
    finally:
        running.kill()


def test_the_printed_request_works_when_pasted(fleet: FleetProcess) -> None:
    printed = re.search(r"^  (curl .*)$", fleet.output, re.M)
    assert printed is not None, fleet.output
    assert " https://fleet.example:" in printed[1]
    done = subprocess.run(
        ["bash", "-c", printed[1]], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    head, _, body = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert json.loads(body)["model"] == "tiny"
    request_id = re.search(r"^x-request-id: (\S+)", head, re.M | re.I)
    assert request_id is not None
    explained = fleet.command("explain", request_id[1])
    assert explained.returncode == 0, explained.stderr
    assert "prefix_cost chose replica-" in explained.stdout


def test_commands_of_the_run_directory_trust_the_fleets_own_certificate(
    fleet: FleetProcess,
) -> None:
    assert fleet.file.url.startswith("https://127.0.0.1:")
    for words in (["status"], ["top", "--once"], ["key", "list"], ["config", "reload"]):
        done = fleet.command(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    status = json.loads(fleet.command("status", "--json").stdout)
    assert [process["process"] for process in status if process["serves"]] == [
        "gateway",
        "replica-0",
        "replica-1",
        "redis",
    ]


def test_a_certificate_that_cannot_be_served_is_one_line_before_anything_starts(
    tmp_path: Path, fleet: FleetProcess
) -> None:
    config = json.loads(fleet.config_file.read_text())
    config["router"]["tls"]["certificate"] = str(tmp_path / "none.pem")
    other = FleetProcess(tmp_path / "other", config)
    other.launch()
    assert other.process.wait(60) == 3
    assert other.output == (
        f"prefixfleet: router.tls.certificate: {tmp_path}/none.pem: No such file or directory\n"
    )

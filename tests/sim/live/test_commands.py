"""Mistakes at the command line are told before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli import EXIT_DEPENDENCY, EXIT_USAGE, main
from tests.redis_server import free_port
from tests.sim.live.conftest import CONVERSATION

VALIDATE = ("replay", "validate", str(CONVERSATION))


@pytest.fixture
def fleet_file(tmp_path: Path) -> str:
    """A configuration; its fleet does not run."""
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: {replicas: 2}\n")
    return str(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tolerance", "speed=1"), "names are cached, replica, hit, ttft"),
        (("--tolerance", "hit"), "--tolerance 'hit': expected NAME=NUMBER"),
        (("--speed-up", "0"), "--speed-up 0: expected more than 0"),
        (("--shrink", "7"), "--shrink 7: expected a divisor of the trace's block size, 512"),
        (("--latency", "h100-8c"), "no such profile"),
        (("--limit", "0"), "no request to send"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    words: tuple[str, ...], told: str, fleet_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*VALIDATE, "-c", fleet_file, "--url", "http://x", *words]) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_without_a_fleet_both_commands_say_how_to_name_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(list(VALIDATE)) == EXIT_USAGE
    assert "which fleet? name its configuration with -c FILE" in capsys.readouterr().err
    assert main(["replay", "calibrate", "-o", "profile.json"]) == EXIT_USAGE
    assert "which replica? give --url" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_a_dependency(
    tmp_path: Path, fleet_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main([*VALIDATE, "-c", fleet_file, "--url", url]) == EXIT_DEPENDENCY
    assert f"{url}/v1/models does not answer" in capsys.readouterr().err
    profile = tmp_path / "profile.json"
    words = ["replay", "calibrate", "--url", url, "--model", "m", "-o", str(profile)]
    assert main(words) == EXIT_DEPENDENCY
    assert not profile.exists()

"""Calibration against a real replica whose step cost is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.latency import load_latency
from tests.sim.live.conftest import run_command, scripted_fleet

COST = {"base_s": 0.03, "per_prefill_token_s": 0.0005, "per_decode_s": 0.01}
"""Long against what HTTP and a busy machine add."""


@pytest.mark.slow
def test_the_fit_recovers_the_step_cost_of_a_scripted_replica(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    with scripted_fleet(
        tmp_path / "fleet",
        tiny_model,
        scripted={"num_blocks": 2049, "cost": COST},
        engine={"max_num_batched_tokens": 256, "max_step_s": 0.0},
    ) as fleet:
        token = json.loads((fleet.run_dir / "secrets.json").read_text())["internal_token"]
        code, report, errors = run_command(
            capsys,
            *("replay", "calibrate", "--url", fleet.file.replicas[0].url, "--key", token),
            *("-o", str(profile), "--vocab-size", "127", "--max-prompt", "512"),
            *("--output-tokens", "8", "--repeats", "3", "--max-num-batched-tokens", "256"),
        )
    assert code == 0, errors
    model = load_latency(str(profile))
    assert model.calibrated
    assert model.base_s == pytest.approx(COST["base_s"], rel=0.35)
    assert model.per_prefill_token_s == pytest.approx(COST["per_prefill_token_s"], rel=0.2)
    assert model.per_decode_s == pytest.approx(COST["per_decode_s"], rel=0.25)
    assert report["fit"]["mean_error"] < 0.15

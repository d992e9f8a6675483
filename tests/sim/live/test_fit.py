"""The least-squares fit gives back the costs that times were made of."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from kvindex.foundation.errors import PrefixFleetError
from sim.latency import LatencyModel
from sim.live.fit import COSTS, Sample, decode_sample, first_token_sample, fit

TRUE = {
    "outside_s": 0.004,
    "base_s": 0.01,
    "per_prefill_token_s": 2e-4,
    "per_prefill_pair_s": 3e-8,
    "per_decode_s": 5e-4,
    "per_context_token_s": 2e-7,
}


def samples(costs: dict[str, float], *, noise: float = 0.0) -> list[Sample]:
    """Return what a calibration would measure of a server with these costs."""
    source = random.Random(7)
    made = [
        first_token_sample(
            "", ttft_s=1.0, num_prompt_tokens=n, num_cached_tokens=cached, max_step_tokens=512
        )
        for n in (64, 128, 256, 512, 1024, 2048, 4096)
        for cached in (0, n - 16, n - 1)
    ]
    made += [
        decode_sample("", interval_s=1.0, batch=batch, context=batch * context)
        for batch, context in itertools.product((1, 2, 4, 8, 16), (64, 2048))
    ]
    return [
        msgspec.structs.replace(
            sample,
            measured_s=sum(costs[name] * n for name, n in zip(COSTS, sample.counts, strict=True))
            * (1 + source.uniform(-noise, noise)),
        )
        for sample in made
    ]


def test_exact_times_give_back_the_costs() -> None:
    found = fit(samples(TRUE))
    assert found.costs == pytest.approx(TRUE, rel=1e-6)
    assert found.max_error < 1e-9


def test_a_cost_that_is_not_there_is_found_to_be_zero() -> None:
    costs = TRUE | {"per_prefill_pair_s": 0.0, "per_context_token_s": 0.0}
    found = fit(samples(costs, noise=0.03))
    assert min(found.costs.values()) >= 0
    assert found.costs["per_prefill_token_s"] == pytest.approx(2e-4, rel=0.05)
    assert found.mean_error < 0.03


def test_one_step_after_a_cached_prompt_counts_as_a_decode_as_in_the_replay() -> None:
    sample = first_token_sample(
        "", ttft_s=1.0, num_prompt_tokens=513, num_cached_tokens=512, max_step_tokens=512
    )
    assert sample.counts == (1.0, 1.0, 0.0, 0.0, 1.0, 512.0)
    chunked = first_token_sample(
        "", ttft_s=1.0, num_prompt_tokens=1100, num_cached_tokens=16, max_step_tokens=512
    )
    assert chunked.counts == (1.0, 3.0, 1084.0, 1084 * 16 + 1084 * 1083 / 2, 0.0, 0.0)


def test_the_model_is_what_a_replay_reads() -> None:
    model = fit(samples(TRUE)).model(name="m", source="here")
    again = msgspec.json.decode(msgspec.json.encode(model), type=LatencyModel)
    assert (again.calibrated, again.name) == (True, "m")
    assert again.base_s == pytest.approx(0.01)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(PrefixFleetError, match="nothing was measured"):
        fit([])

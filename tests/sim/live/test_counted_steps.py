"""Steps are counted as the engine takes them: a replica of known cost, measured in virtual time."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import msgspec

from engine.config import EngineConfig
from sim.latency import LatencyModel
from sim.live.fit import decode_sample, first_token_sample, fit
from sim.live.measure import BATCHES, MeasurePlan
from sim.virtual_replica import VirtualReplica
from tests.sim.replaying import BLOCK_SIZE, arrivals, row

SLOW = LatencyModel(
    name="slow",
    base_s=0.1,
    per_prefill_token_s=0.01,
    per_prefill_pair_s=2e-6,
    per_decode_s=0.003,
    per_context_token_s=1e-5,
)
"""Half a second is enough for some 30 tokens of a prompt."""

ENGINE = EngineConfig()
PLAN = MeasurePlan(
    model="m",
    max_step_tokens=ENGINE.max_num_batched_tokens,
    max_step_s=ENGINE.max_step_s,
    vocab_size=256,
    seed=1,
)


class FirstToken(NamedTuple):
    """What a client and `usage` see of a request."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


def first_tokens(latency: LatencyModel) -> list[FirstToken]:
    """Warm up, then ask for new prompts and the same again, one by one, as a calibration does."""
    replica = VirtualReplica(
        num_blocks=4096, block_size=BLOCK_SIZE, engine=ENGINE, latency=latency, fast=False
    )
    lengths = [PLAN.max_prompt, *PLAN.lengths]
    prompts = [(length, first) for first, length in enumerate(lengths) for _ in range(2)]
    rows = [
        row(line, 0.0, range(1000 * first, 1000 * first + length // BLOCK_SIZE), output_length=1)
        for line, (length, first) in enumerate(prompts, start=1)
    ]
    seen, now = [], 0.0
    for arrival in arrivals(rows):
        replica.add(arrival, now)
        ((cached, end_s),) = [
            (output.num_cached_tokens, result.end_s)
            for result in replica.advance(math.inf)
            for output in result.outputs
        ]
        seen.append(FirstToken(end_s - now, arrival.num_prompt_tokens, cached or 0))
        now = end_s
    return seen[2:]


def fitted(plan: MeasurePlan) -> LatencyModel:
    """Fit what a calibration measures of the slow machine."""
    samples = [
        first_token_sample(
            "",
            ttft_s=seen.ttft_s,
            num_prompt_tokens=seen.num_prompt_tokens,
            num_cached_tokens=seen.num_cached_tokens,
            max_step_tokens=plan.step_tokens(
                (seen.num_prompt_tokens - seen.num_cached_tokens) / seen.ttft_s
            ),
        )
        for seen in first_tokens(SLOW)
    ]
    for batch, length in itertools.product(BATCHES, plan.contexts):
        context = batch * length
        step_s = SLOW.step_s(prefill_tokens=0, prefill_pairs=0, decodes=batch, context=context)
        samples.append(decode_sample("", interval_s=step_s, batch=batch, context=context))
    return fit(samples).model(name="fitted", source="")


def errors(model: LatencyModel) -> list[float]:
    """Return by how much a replay with this model misses each first token, as shares."""
    pairs = zip(first_tokens(model), first_tokens(SLOW), strict=True)
    return [replayed.ttft_s / real.ttft_s - 1 for replayed, real in pairs]


def test_a_replay_takes_as_long_as_an_engine_that_limits_the_seconds_of_a_step() -> None:
    found = errors(fitted(PLAN))
    assert max(map(abs, found)) < 0.05


def test_long_prompts_take_too_long_where_steps_are_not_counted() -> None:
    found = errors(fitted(msgspec.structs.replace(PLAN, max_step_s=0.0)))
    assert max(found) > 0.15

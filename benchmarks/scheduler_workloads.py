"""Workloads on the scheduler alone: what a step costs, without a model.

Each is defined so that another engine's scheduler can be given the same one; times are those of
`schedule` and `update_from_output` of one step together, in microseconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.frontend.sampling_params import SamplingParams
from engine.kv_cache_manager import KVCacheManager
from engine.messages import EngineRequest
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request
from engine.scheduler import Scheduler
from engine.stats import EngineCounters
from kvindex.hashing import HashScheme, hash_tokens

SCHEME = HashScheme()
VOCAB = range(49152)
MAX_MODEL_LEN = 32768
Samples = list[float]
Action = Callable[[], object]


class Bench:
    """A scheduler over `num_blocks` usable blocks, first come first served."""

    def __init__(self, rng: random.Random, *, num_blocks: int) -> None:
        self.rng = rng
        config = EngineConfig(
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            policy="fcfs",
            watermark=0.0,
            max_prefill_share=1.0,
        )
        self.kv_cache = KVCacheManager(BlockPool(num_blocks + 1, block_size=config.block_size))
        self.scheduler = Scheduler(
            config, self.kv_cache, max_model_len=MAX_MODEL_LEN, counters=EngineCounters()
        )
        self._num_requests = 0

    def tokens(self, count: int) -> list[int]:
        """Draw token ids."""
        return self.rng.choices(VOCAB, k=count)

    def request(self, prompt: list[int], *, max_tokens: int) -> Request:
        """Build a request, its hashes included."""
        self._num_requests += 1
        source = EngineRequest(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        return Request.admit(source, SCHEME, arrival=self._num_requests)

    def step(self) -> float:
        """Run one step; return its cost in microseconds."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        took = time.perf_counter() - started
        output = ModelRunnerOutput(sampled_token_ids=self._sample(scheduled))
        started = time.perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        return (took + time.perf_counter() - started) * 1e6

    def start(self, count: int, *, max_tokens: int) -> None:
        """Add requests of 512 tokens and run until each has a sampled token."""
        requests = [self.request(self.tokens(512), max_tokens=max_tokens) for _ in range(count)]
        for request in requests:
            self.scheduler.add(request)
        while not all(request.num_output_tokens for request in requests):
            self.step()

    def _sample(self, scheduled: SchedulerOutput) -> dict[str, list[int]]:
        requests = self.scheduler.requests
        ids = [i for i in scheduled.num_scheduled_tokens if requests[i].num_placeholders]
        return {i: [token] for i, token in zip(ids, self.tokens(len(ids)), strict=True)}


def steady_decode(rng: random.Random, *, num_requests: int, num_steps: int) -> Samples:
    """Decode `num_requests` requests; nothing is admitted, preempted or evicted."""
    bench = Bench(rng, num_blocks=num_requests * 64)
    bench.start(num_requests, max_tokens=4096)
    for _ in range(32):
        bench.step()
    return [bench.step() for _ in range(num_steps)]


def steady_admission(
    rng: random.Random, *, num_prefixes: int, num_blocks: int, num_steps: int
) -> tuple[Samples, Samples]:
    """Admit one 8,192-token prompt a step, 7,168 of them cached, beside 63 that decode.

    With several prefixes each is idle half of the time. Returns the steps, and the steps with
    building, hashing and adding the request.
    """
    bench = Bench(rng, num_blocks=num_blocks)
    prefixes = [bench.tokens(7168) for _ in range(num_prefixes)]
    if num_prefixes > 1:
        for prefix in prefixes:
            bench.scheduler.add(bench.request(prefix + bench.tokens(1024), max_tokens=1))
            while bench.scheduler.requests:
                bench.step()
    steps: Samples = []
    whole: Samples = []
    for i in range(64 + 256 + num_steps):
        prompt = prefixes[i % num_prefixes] + bench.tokens(1024)
        started = time.perf_counter()
        bench.scheduler.add(bench.request(prompt, max_tokens=64))
        arrival_us = (time.perf_counter() - started) * 1e6
        step_us = bench.step()
        if i >= 64 + 256:
            steps.append(step_us)
            whole.append(arrival_us + step_us)
    return steps, whole


def preemption_pressure(rng: random.Random, *, num_steps: int) -> Samples:
    """Let 256 requests grow in a pool that holds 70 % of what they need."""
    bench = Bench(rng, num_blocks=8601)
    bench.start(256, max_tokens=256)
    return [bench.step() for _ in range(num_steps)]


def prefix_look_up(rng: random.Random, *, repeat: int) -> Samples:
    """Find a chain of 1,000 cached blocks."""
    bench = Bench(rng, num_blocks=2048)
    prompt = bench.tokens(16001)
    bench.scheduler.add(bench.request(prompt, max_tokens=1))
    while bench.scheduler.requests:
        bench.step()
    request = bench.request(prompt, max_tokens=1)
    return _timed(lambda: bench.kv_cache.find_hit(request), repeat)


def block_hashing(rng: random.Random, *, repeat: int) -> Samples:
    """Hash 512 blocks of 16 tokens."""
    tokens = rng.choices(VOCAB, k=8192)
    return _timed(lambda: hash_tokens(tokens, SCHEME), repeat)


def _timed(action: Action, repeat: int) -> Samples:
    samples = []
    for i in range(20 + repeat):
        started = time.perf_counter()
        action()
        if i >= 20:
            samples.append((time.perf_counter() - started) * 1e6)
    return samples

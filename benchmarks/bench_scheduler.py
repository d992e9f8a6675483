"""Cost of the engine's own decisions: a step of the scheduler, a prefix look-up, hashing.

    python -m benchmarks.bench_scheduler [--quick] [--json]

The scripted executor is left out: steps are scheduled and answered with a fixed token.
"""

from __future__ import annotations

from benchmarks.timing import Report, Row, arguments, at_most, machine, median_us, show
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.frontend.sampling_params import SamplingParams
from engine.kv_cache_manager import KVCacheManager
from engine.messages import EngineRequest
from engine.output import ModelRunnerOutput
from engine.request import Request
from engine.scheduler import Scheduler
from engine.stats import EngineCounters
from kvindex.hashing import HashScheme, hash_tokens
from worker.core.process import settle_garbage_collector

SCHEME = HashScheme()


def make_scheduler(num_seqs: int) -> Scheduler:
    """Build a scheduler with room for `num_seqs` running requests."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    kv_cache = KVCacheManager(BlockPool(64 * num_seqs + 2000, block_size=16))
    return Scheduler(config, kv_cache, max_model_len=16384, counters=EngineCounters())


def make_request(i: int, num_tokens: int) -> Request:
    """Build a request of its own tokens that never ends by itself."""
    tokens = [(i * 7919 + j) % 49152 for j in range(num_tokens)]
    source = EngineRequest(
        request_id=f"r{i}", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=10_000)
    )
    return Request.admit(source, SCHEME, arrival=i)


def step(scheduler: Scheduler) -> None:
    """Schedule one step and answer it."""
    scheduled = scheduler.schedule()
    tokens = {request_id: [17] for request_id in scheduled.num_scheduled_tokens}
    scheduler.update_from_output(scheduled, ModelRunnerOutput(sampled_token_ids=tokens))


def running(num_seqs: int, repeat: int) -> float:
    """Return the median microseconds of a step with `num_seqs` decoding requests."""
    scheduler = make_scheduler(num_seqs)
    for i in range(num_seqs):
        scheduler.add(make_request(i, 32))
    while len(scheduler.running) < num_seqs:
        step(scheduler)
    return median_us(lambda: step(scheduler), repeat=repeat)


def look_up(num_blocks: int, repeat: int) -> float:
    """Return the median microseconds of finding a wholly cached chain."""
    pool = BlockPool(num_blocks + 10, block_size=16)
    request = make_request(0, num_blocks * 16 + 1)
    hashes = request.chain.hashes
    blocks = pool.allocate(num_blocks)
    for i, block in enumerate(blocks):
        pool.commit(block, hashes[i], hashes[i - 1] if i else None)
    kv_cache = KVCacheManager(pool)
    return median_us(lambda: kv_cache.find_hit(request), repeat=repeat)


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    repeat = 50 if options.quick else 300
    settle_garbage_collector()  # as the engine-core process does
    rows: list[Row] = [
        at_most(f"step, {n} running requests", running(n, repeat), "us", goal)
        for n, goal in ((16, 93.0), (256, 1510.0), (1024, 7350.0))
    ]
    rows.append(at_most("look-up of 1,000 cached blocks", look_up(1000, repeat), "us", 150.0))
    tokens = [(j * 7919) % 49152 for j in range(8192)]
    hashing = median_us(lambda: hash_tokens(tokens, SCHEME), repeat=repeat)
    rows.append(at_most("hashing 8,192 tokens", hashing, "us", 600.0))
    report = Report(
        claim="The engine decides in microseconds",
        machine=machine(),
        settings={"block_size": 16, "repeat": repeat},
        rows=rows,
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()

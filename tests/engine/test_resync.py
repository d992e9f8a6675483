"""A runner that loses steps or its memory is brought back, and no output changes."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.kv_groups.spec import (
    ONE_FULL_ATTENTION_GROUP,
    FullAttention,
    KVGroupSpec,
    LinearState,
    SlidingWindow,
)
from engine.messages import EngineRequest
from engine.output import SchedulerOutput
from engine.resync import MAX_RESYNCS
from engine.scripted_executor import ScriptedExecutor
from engine.step_stream import PROTOCOL_VERSION, OutOfStepError, StepReceiver, StepSender
from kvindex.events import AllBlocksCleared
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import BLOCK_SIZE, Run, alone, make_request
from tests.engine.lossy_executor import Fault, LossyExecutor

REQUESTS = [
    make_request("long", range(30), max_tokens=6),
    make_request("sibling", range(30), max_tokens=6, temperature=0.8, seed=3),
    make_request("short", [7, 8, 9], max_tokens=12),
]


def lossy_core(
    faults: dict[int, Fault],
    *,
    num_blocks: int = 32,
    kv_groups: tuple[KVGroupSpec, ...] = ONE_FULL_ATTENTION_GROUP,
    **settings: object,
) -> EngineCore:
    """A core with chunks of 8 tokens over a lossy border."""
    plain = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "watermark": 0.0,
        "max_step_s": 0.0,
        "max_prefill_share": 1.0,
        "check_integrity": True,
    }
    config = msgspec.convert({**plain, **settings}, EngineConfig)

    def make_runner() -> Executor:
        return ScriptedExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_groups=kv_groups)

    return EngineCore(config, LossyExecutor(make_runner, faults), VirtualClock())


def finished(core: EngineCore, requests: list[EngineRequest]) -> Run:
    for request in requests:
        core.add(request)
    return Run(core).to_end()


def resyncs_of(core: EngineCore) -> list[SchedulerOutput]:
    assert isinstance(core.executor, LossyExecutor)
    return core.executor.resyncs


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("fault", ["spoiled", "repeated", "restarted", "died"])
@pytest.mark.parametrize("at", [2, 4, 7, 11])
def test_tokens_are_those_of_an_undisturbed_run(fault: Fault, at: int, depth: int) -> None:
    core = lossy_core({at: fault}, async_depth=depth)
    run = finished(core, REQUESTS)
    assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}
    assert len(resyncs_of(core)) == core.stats().resyncs_total == 1
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fault", ["spoiled", "died"])
@pytest.mark.parametrize("at", [6, 9, 13, 18, 24])
def test_moves_to_and_from_the_host_tier_survive_it(fault: Fault, at: int, depth: int) -> None:
    requests = [
        make_request(f"r{i}", range(i, 10 + i % 3 * 9), max_tokens=8) for i in (0, 1, 2, 0, 1)
    ]
    requests = [msgspec.structs.replace(r, request_id=f"r{i}") for i, r in enumerate(requests)]
    core = lossy_core({at: fault}, num_blocks=12, num_host_blocks=16, async_depth=depth)
    run = finished(core, requests)
    assert run.tokens == {request.request_id: alone(request) for request in requests}
    assert core.counters.preemptions > 0
    assert len(resyncs_of(core)) == 1


@pytest.mark.parametrize("fault", ["spoiled", "died"])
@pytest.mark.parametrize("at", [2, 5, 9])
@pytest.mark.parametrize("name", ["window", "state"])
def test_groups_that_give_blocks_back_survive_it(name: str, fault: Fault, at: int) -> None:
    other: KVGroupSpec = SlidingWindow(window=9) if name == "window" else LinearState(block_size=8)
    groups = (FullAttention(), other)

    def tokens(faults: dict[int, Fault]) -> dict[str, list[int]]:
        core = lossy_core(faults, num_blocks=64, kv_groups=groups, async_depth=1)
        return finished(core, REQUESTS).tokens

    assert tokens({at: fault}) == tokens({})


FAULTS: tuple[Fault, ...] = ("spoiled", "repeated", "restarted", "died")


def check_random_faults(seed: int) -> None:
    """Run random requests over a small pool with random faults, some steps apart."""
    random = Random(seed)
    requests = [
        make_request(
            f"r{i}",
            range(random.randrange(3), random.randrange(5, 30)),
            max_tokens=random.randrange(1, 9),
            temperature=random.choice([0.0, 0.9]),
            seed=i,
        )
        for i in range(random.randrange(2, 7))
    ]
    at, faults = 0, dict[int, Fault]()
    for _ in range(random.randrange(1, 6)):
        at += random.randrange(4, 12)
        faults[at] = random.choice(FAULTS)
    core = lossy_core(
        faults,
        num_blocks=random.choice([11, 16, 40]),
        num_host_blocks=random.choice([0, 4, 20]),
        async_depth=random.randrange(3),
    )
    run = finished(core, requests)
    assert run.tokens == {request.request_id: alone(request) for request in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_change_no_token(seed: int) -> None:
    check_random_faults(seed)


@pytest.mark.slow
def test_a_thousand_runs_with_random_faults_change_no_token() -> None:
    for seed in range(40, 1040):
        check_random_faults(seed)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_lost_step_is_noticed_at_the_next_one(at: int) -> None:
    core = lossy_core({at: "lost"}, async_depth=1)
    run = finished(core, REQUESTS)
    assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}
    assert len(resyncs_of(core)) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_a_second_fault_during_the_resync_is_survived(depth: int) -> None:
    faults: dict[int, Fault] = {4: "spoiled", 5 + depth: "died", 6 + 2 * depth: "spoiled"}
    run = finished(lossy_core(faults, async_depth=depth), REQUESTS)
    assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}


def test_a_resync_tells_all_that_runs_with_its_tokens_and_blocks() -> None:
    core = lossy_core({3: "spoiled"})
    core.add(REQUESTS[0])
    run = Run(core)
    for _ in range(3):
        run.step()
    run.step()
    (resync,) = resyncs_of(core)
    (request,) = resync.new_requests
    assert request.token_ids == REQUESTS[0].prompt_token_ids
    # Two chunks of 8 tokens had been computed: their 4 blocks are still there.
    assert request.num_computed_tokens == 16
    assert request.block_ids == core.kv_cache.block_ids(core.scheduler.running[0])
    assert resync.num_scheduled_tokens == {"long": 8}
    assert run.to_end().tokens["long"] == alone(REQUESTS[0])


def test_a_runner_whose_memory_is_gone_computes_everything_again() -> None:
    core = lossy_core({3: "died"})
    core.add(REQUESTS[0])
    run = Run(core)
    for _ in range(4):
        run.step()
    (resync,) = resyncs_of(core)
    assert [request.num_computed_tokens for request in resync.new_requests] == [0]
    assert AllBlocksCleared() in core.take_events()
    assert run.to_end().tokens["long"] == alone(REQUESTS[0])


@pytest.mark.parametrize("fault", ["spoiled", "died"])
def test_a_runner_may_be_lost_while_it_is_out_of_memory(fault: Fault) -> None:
    core = lossy_core({5: fault}, async_depth=2, slab_blocks=4)
    for request in REQUESTS:
        core.add(request)
    run = Run(core)
    for _ in range(4):
        run.step()
    assert isinstance(core.executor, LossyExecutor)
    assert isinstance(core.executor.runner, ScriptedExecutor)
    core.executor.runner.max_device_blocks = 28
    run.to_end()
    assert core.kv_cache.pool.num_blocks == 28
    assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}
    assert len(resyncs_of(core)) == 1


def test_requests_that_were_aborted_meanwhile_stay_gone() -> None:
    core = lossy_core({3: "spoiled"})
    core.add(REQUESTS[0])
    core.add(REQUESTS[2])
    run = Run(core)
    for _ in range(3):
        run.step()
    core.abort(["long"])
    assert run.to_end().tokens == {"short": alone(REQUESTS[2])}


def test_an_executor_that_never_recovers_is_given_up() -> None:
    faults: dict[int, Fault] = {step: "spoiled" for step in range(3, 20)}
    core = lossy_core(faults)
    core.add(REQUESTS[0])
    run = Run(core)
    with pytest.raises(OutOfStepError, match="follows one that was lost"):
        run.to_end()
    assert len(resyncs_of(core)) == MAX_RESYNCS


def empty_step(number: int, *, resync: bool = False) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        new_requests=[],
        new_block_ids={},
        num_scheduled_tokens={},
        num_computed_tokens={},
        dropped_request_ids=[f"r{number}"],
        resync=resync,
    )


def test_a_receiver_says_what_it_expected_until_a_resync() -> None:
    sender, receiver = StepSender(), StepReceiver()
    frames = [sender.frame(empty_step(number)) for number in range(1, 5)]
    assert receiver.take(frames[0]) == empty_step(1)
    with pytest.raises(OutOfStepError, match="step 3 came, step 2 was expected"):
        receiver.take(frames[2])
    with pytest.raises(OutOfStepError, match="step 2 follows one that was lost"):
        receiver.take(frames[1])
    resync = empty_step(5, resync=True)
    assert receiver.take(sender.frame(resync)) == resync
    assert receiver.take(sender.frame(empty_step(6))) == empty_step(6)


def test_two_senders_with_equal_numbers_are_told_apart() -> None:
    one, other, receiver = StepSender(), StepSender(), StepReceiver()
    receiver.take(one.frame(empty_step(1)))
    other.frame(empty_step(1, resync=True))
    other.frame(empty_step(7))
    with pytest.raises(OutOfStepError, match="step 2 has digest"):
        receiver.take(other.frame(empty_step(2)))


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgspec.msgpack.encode([PROTOCOL_VERSION, 0, 7])])
def test_garbage_is_out_of_step(frame: bytes) -> None:
    with pytest.raises(OutOfStepError, match="does not decode"):
        StepReceiver().take(frame)


def test_another_version_names_both() -> None:
    frame = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, 0, {}])
    with pytest.raises(OutOfStepError, match=r"version 2, this runner knows 1"):
        StepReceiver().take(frame)

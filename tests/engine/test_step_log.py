"""A recorded run computes the same tokens again, and a damaged or foreign log says so."""

from __future__ import annotations

import io

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.scripted_executor import ScriptedExecutor
from engine.step_log import (
    FailureRecord,
    OutputRecord,
    RecordingExecutor,
    StepLog,
    StepLogError,
    StepRecord,
    replay,
)
from engine.step_stream import PROTOCOL_VERSION, StepSender
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import BLOCK_SIZE, Run, alone, make_request
from tests.engine.lossy_executor import Fault, LossyExecutor

NUM_BLOCKS = 24
REQUESTS = [
    make_request(f"r{i}", range(i % 2, 20 + i), max_tokens=9, temperature=float(i % 2), seed=i)
    for i in range(6)
]


def scripted(*, num_blocks: int = NUM_BLOCKS, vocab_size: int = 256) -> ScriptedExecutor:
    return ScriptedExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=vocab_size)


def record(executor: Executor, **settings: object) -> tuple[bytes, dict[str, list[int]]]:
    """Run all requests over a recorded executor: the log, and the tokens."""
    plain = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "watermark": 0.0,
        "max_step_s": 0.0,
    }
    config = msgspec.convert({**plain, **settings}, EngineConfig)
    stream = io.BytesIO()
    core = EngineCore(config, RecordingExecutor(executor, stream), VirtualClock())
    for request in REQUESTS:
        core.add(request)
    run = Run(core).to_end()
    core.executor.close()
    return stream.getvalue(), run.tokens


@pytest.mark.parametrize("depth", [0, 2])
def test_a_replay_gives_the_tokens_of_the_recording(depth: int) -> None:
    log, tokens = record(scripted(), async_depth=depth)
    result = replay(StepLog(io.BytesIO(log)), scripted())
    for request in REQUESTS:
        sampled = result.sampled_token_ids[request.request_id]
        assert sampled[: len(tokens[request.request_id])] == alone(request)


@pytest.mark.parametrize("fault", ["spoiled", "died"])
def test_a_recording_with_a_resync_replays_too(fault: Fault) -> None:
    log, _ = record(LossyExecutor(scripted, {5: fault}), async_depth=1)
    result = replay(StepLog(io.BytesIO(log)), scripted())
    assert {len(tokens) for tokens in result.sampled_token_ids.values()} == {9}


def test_a_recording_with_too_little_memory_replays_too() -> None:
    executor = scripted()
    executor.max_device_blocks = 20
    log, _ = record(executor, slab_blocks=2)
    result = replay(StepLog(io.BytesIO(log)), scripted())
    for request in REQUESTS:
        assert result.sampled_token_ids[request.request_id] == alone(request)


def test_a_log_that_a_crash_cut_off_replays_up_to_there() -> None:
    log, _ = record(scripted())
    whole = replay(StepLog(io.BytesIO(log)), scripted())
    cut = StepLog(io.BytesIO(log[: len(log) // 2]))
    assert 0 < replay(cut, scripted()).num_steps < whole.num_steps
    assert cut.is_truncated


def test_a_runner_that_computes_something_else_is_caught_at_its_first_step() -> None:
    class Wrong(ScriptedExecutor):
        def _sample(self, row: object, num_ahead: int) -> int:
            return 7

    log, _ = record(scripted())
    with pytest.raises(
        StepLogError, match=r"step 3: sampled_token_ids was .*, now it is \{'r0': \[7"
    ):
        replay(StepLog(io.BytesIO(log)), Wrong(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))


def test_another_model_or_a_smaller_cache_is_refused() -> None:
    log, _ = record(scripted())
    with pytest.raises(
        StepLogError, match="of model scripted-256-0, the executor has scripted-9-0"
    ):
        replay(StepLog(io.BytesIO(log)), scripted(vocab_size=9))
    with pytest.raises(StepLogError, match="needs 24 blocks, the executor has 23"):
        replay(StepLog(io.BytesIO(log)), scripted(num_blocks=23))


def test_what_is_no_log_or_is_damaged_says_so() -> None:
    for garbage in (b"", b"\x00\x00\x00\x01\xc1", b"hello, world"):
        with pytest.raises(StepLogError, match="not a step log"):
            StepLog(io.BytesIO(garbage))
    log, _ = record(scripted())
    other = log.replace(b"prefixfleet-step-log/1", b"prefixfleet-step-log/9")
    with pytest.raises(StepLogError, match="step-log/9"):
        StepLog(io.BytesIO(other))
    prompt = bytes(range(20))  # small integers are their own encoding
    damaged = log.replace(prompt, prompt[::-1], 1)
    assert damaged != log
    with pytest.raises(StepLogError, match="the log is damaged: step 1 has digest"):
        replay(StepLog(io.BytesIO(damaged)), scripted())
    assert PROTOCOL_VERSION == 1, "a new protocol needs a new log format"


def framed(*records: object) -> bytes:
    """Write a log by hand."""
    stream = io.BytesIO()
    RecordingExecutor(scripted(), stream)
    for record in records:
        payload = msgspec.msgpack.encode(record)
        stream.write(len(payload).to_bytes(4, "big") + payload)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (OutputRecord(ModelRunnerOutput(sampled_token_ids={})), "an output without a step"),
        (FailureRecord("out_of_memory"), "a failure without a step"),
        ({"type": "unknown"}, "a record does not decode"),
    ],
)
def test_a_log_that_contradicts_itself_says_so(record: object, problem: str) -> None:
    with pytest.raises(StepLogError, match=problem):
        replay(StepLog(io.BytesIO(framed(record))), scripted())


def test_a_step_about_a_request_that_does_not_run_is_named() -> None:
    step = SchedulerOutput(
        step=1,
        new_requests=[],
        new_block_ids={},
        num_scheduled_tokens={"ghost": 1},
        num_computed_tokens={"ghost": 0},
        dropped_request_ids=[],
    )
    log = framed(
        StepRecord(StepSender().frame(step)),
        OutputRecord(ModelRunnerOutput(sampled_token_ids={})),
    )
    with pytest.raises(StepLogError, match="step 1: ghost does not run"):
        replay(StepLog(io.BytesIO(log)), scripted())

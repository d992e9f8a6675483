"""Core processes that die, hang, talk nonsense or are closed twice: no hang, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.frontend.errors import RequestError
from engine.messages import EngineOutput, EngineRequest
from engine.scripted_executor import ScriptedExecutor, StepCost
from engine.step_log import StepLog, replay
from kvindex.foundation.errors import DependencyError
from tests.conditions import until
from tests.engine.build import alone, make_request
from tests.worker.core.build import children, exists, scripted_spec
from worker.core.client import EngineClient
from worker.core.data_parallel import DataParallelClient
from worker.core.process_client import ProcessClient
from worker.core.spec import CoreSpec
from worker.core.sync_client import SyncProcessClient

SLOW = StepCost(base_s=0.05)


async def tokens_of(client: EngineClient, request: EngineRequest) -> list[int]:
    return [token async for output in client.generate(request) for token in output.token_ids]


def unstartable_spec() -> CoreSpec:
    """A core that is to publish events on an address that is not this machine's."""
    return msgspec.structs.replace(
        scripted_spec(), publish_events=True, events_endpoint="tcp://192.0.2.1:5557"
    )


def shout(folder: Path) -> None:
    """Send what no core sends to the front's end of both sockets."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{folder}/core-out.sock")
        for payload in (b"", b"\xc1garbage", b"\x81\xa4type\xa5ready"):
            socket.send(payload)
        socket.close(linger=1000)


async def test_a_killed_core_ends_its_requests_at_once(tmp_path: Path) -> None:
    client = await ProcessClient.start(scripted_spec(cost=SLOW), socket_dir=tmp_path / "sockets")
    try:
        outputs = client.generate(make_request("a", range(9), max_tokens=200))
        await anext(outputs)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="exit code -9"):
            async for _ in outputs:
                pass
        assert client.dead_reason is not None
    finally:
        await client.close()


def test_a_core_that_was_killed_while_idle_refuses_the_next_request(tmp_path: Path) -> None:
    with SyncProcessClient(scripted_spec(), socket_dir=tmp_path / "sockets") as client:
        list(client.generate([make_request("a", [1])]))
        os.kill(client.pid, signal.SIGKILL)
        os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(2):
            with pytest.raises(RequestError, match="exit code -9"):
                list(client.generate([make_request("b", [1])]))


def test_a_killed_core_ends_a_blocking_wait_at_once(tmp_path: Path) -> None:
    with SyncProcessClient(scripted_spec(cost=SLOW), socket_dir=tmp_path / "sockets") as client:
        outputs = client.generate([make_request("a", range(9), max_tokens=200)])
        next(outputs)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="exit code -9"):
            list(outputs)
        with pytest.raises(RequestError, match="exit code -9"):
            client.poll(0)
        with pytest.raises(RequestError, match="exit code -9"):
            client.snapshot()
    assert list((tmp_path / "sockets").iterdir()) == []


async def test_a_core_outlives_its_runner(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "r0.steps"
    spec = msgspec.structs.replace(scripted_spec(cost=SLOW), runner_process=True, step_log=str(log))
    request = make_request("a", range(9), max_tokens=8)
    client = await ProcessClient.start(spec, socket_dir=tmp_path / "s")
    try:
        running = asyncio.create_task(tokens_of(client, request))
        await until(lambda: client.stats.generation_tokens_total >= 2)
        (runner,) = children(client.pid)
        os.kill(runner, signal.SIGKILL)
        assert await running == alone(request)
        assert children(client.pid) != {runner}
        (runner,) = children(client.pid)
    finally:
        await client.close()
    await until(lambda: not exists(runner))
    assert list((tmp_path / "s").iterdir()) == []
    assert log.stat().st_mode & 0o777 == 0o600
    with log.open("rb") as stream:
        result = replay(StepLog(stream), ScriptedExecutor(num_blocks=64, block_size=4))
    assert result.sampled_token_ids == {"a": alone(request)}


async def test_a_core_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = unstartable_spec()
    with pytest.raises(DependencyError, match="ended with exit code 3"):
        await ProcessClient.start(broken, socket_dir=tmp_path / "sockets")
    with pytest.raises(DependencyError, match="ended with exit code 3"):
        SyncProcessClient(broken, socket_dir=tmp_path / "sockets")
    assert list((tmp_path / "sockets").iterdir()) == []


async def test_a_core_that_hangs_at_its_start_is_given_up_and_killed(tmp_path: Path) -> None:
    before = children()
    starting = asyncio.create_task(
        ProcessClient.start(scripted_spec(), socket_dir=tmp_path / "sockets", start_timeout_s=0.5)
    )
    await until(lambda: children() - before)
    (pid,) = children() - before
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        DependencyError, match=r"r0 was not ready in 0\.5 s|r0 was not ready in 0 s"
    ):
        await starting
    assert not exists(pid)
    assert list((tmp_path / "sockets").iterdir()) == []


def test_a_blocking_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(DependencyError, match="r0: the engine core has not been heard for 0 s"):
        SyncProcessClient(scripted_spec(), socket_dir=tmp_path / "sockets", start_timeout_s=0)
    assert children() == before
    assert list((tmp_path / "sockets").iterdir()) == []


def test_a_core_that_hangs_ends_a_blocking_wait_after_its_silence(tmp_path: Path) -> None:
    with SyncProcessClient(
        scripted_spec(cost=SLOW), socket_dir=tmp_path / "sockets", silence_s=1.0
    ) as client:
        outputs = client.generate([make_request("a", range(9), max_tokens=200)])
        next(outputs)
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(RequestError, match="has not been heard for 1 s"):
            list(outputs)
        pid = client.pid
    assert not exists(pid)


async def test_garbage_on_the_socket_is_dropped_and_serving_goes_on(tmp_path: Path) -> None:
    request = make_request("a", range(9))
    client = await ProcessClient.start(scripted_spec(), socket_dir=tmp_path / "a")
    try:
        shout(tmp_path / "a")
        assert await tokens_of(client, request) == alone(request)
        assert client.dead_reason is None
    finally:
        await client.close()
    with SyncProcessClient(scripted_spec(), socket_dir=tmp_path / "s") as blocking:
        shout(tmp_path / "s")
        outputs = list(blocking.generate([request]))
        assert [token for o in outputs for token in o.token_ids] == alone(request)


async def test_closing_twice_at_once_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    client = await ProcessClient.start(scripted_spec(), socket_dir=tmp_path / "sockets")
    pid = client.pid
    await asyncio.gather(client.close(), client.close())
    assert not exists(pid)
    assert list((tmp_path / "sockets").iterdir()) == []


async def test_one_of_two_ranks_dies_alone_and_comes_back_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.core.data_parallel.FIRST_RESTART_DELAY_S", 0.05)
    cores: list[ProcessClient] = []

    async def start_core(rank: int) -> EngineClient:
        folder = tmp_path / f"rank{rank}"
        cores.append(await ProcessClient.start(scripted_spec(cost=SLOW), socket_dir=folder))
        return cores[-1]

    client = await DataParallelClient.start(2, start_core, max_step_tokens=64)
    doomed = asyncio.create_task(run_on(client, 1, make_request("a", range(9), max_tokens=200)))
    request = make_request("b", range(9), max_tokens=8)
    spared = asyncio.create_task(run_on(client, 0, request))
    victim = client.ranks[1]
    assert isinstance(victim, ProcessClient)
    try:
        await until(lambda: victim.stats.num_running == 1)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="exit code -9"):
            await doomed
        # The cache of the dead rank is gone, so another may as well serve what was meant for it.
        assert client.dead_reason is None
        assert len(await run_on(client, 1, make_request("c", [1]))) == 4
        assert [t for o in await spared for t in o.token_ids] == alone(request)
        await until(lambda: client.ranks[1] is not victim)
        snapshots = await client.snapshots()
        assert [bool(snapshot.entries) for snapshot in snapshots] == [True, False]
        assert len(await run_on(client, 1, make_request("d", [1]))) == 4
        assert client.ranks[1].stats.generation_tokens_total == 4
    finally:
        await client.close()
    assert not any(exists(core.pid) for core in cores)


async def run_on(client: EngineClient, rank: int, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(request, dp_rank=rank)]


async def test_when_the_last_rank_dies_the_client_is_dead_and_says_of_what(tmp_path: Path) -> None:
    async def start_core(rank: int) -> EngineClient:
        return await ProcessClient.start(scripted_spec(), socket_dir=tmp_path / f"rank{rank}")

    client = await DataParallelClient.start(2, start_core, max_step_tokens=64)
    try:
        for core in client.ranks:
            assert isinstance(core, ProcessClient)
            os.kill(core.pid, signal.SIGKILL)
        await until(lambda: client.dead_reason is not None)
        ended = "the engine core ended with exit code -9"
        assert client.dead_reason == f"rank 0: {ended}; rank 1: {ended}"
        with pytest.raises(RequestError, match="exit code -9"):
            await tokens_of(client, make_request("a", [1]))
    finally:
        await client.close()


async def test_when_one_rank_cannot_start_the_others_are_ended(tmp_path: Path) -> None:
    before = children()

    async def start_core(rank: int) -> EngineClient:
        spec = unstartable_spec() if rank else scripted_spec()
        return await ProcessClient.start(spec, socket_dir=tmp_path / f"rank{rank}")

    with pytest.raises(DependencyError, match="ended with exit code 3"):
        await DataParallelClient.start(2, start_core, max_step_tokens=64)
    assert children() == before

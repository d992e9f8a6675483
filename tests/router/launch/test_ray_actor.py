"""What the actor of a replica does with it, on this machine and without a cluster."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.launch.children import ReplicaSettings
from router.launch.down import is_alive
from router.launch.http_call import answers_ok
from router.launch.ports import any_free_port
from router.launch.ray_actor import (
    PORT_STEP,
    Ended,
    FromActor,
    Output,
    Placed,
    ReplicaActor,
    ReplicaOrder,
    settle,
)
from tests.conditions import until
from tests.e2e.fleet_process import tiny_folder, with_descendants
from tests.router.launch.test_ray_plan import settings

NODE = "127.0.0.2"
KEY = f"test-{os.getpid()}"


def settled(*, on_network: bool, **fields: Any) -> ReplicaSettings:
    port = any_free_port("127.0.0.1")
    order = ReplicaOrder(
        settings=settings(port=port, **fields), on_network=on_network, folder="/", key="k"
    )
    found = settle(order, node=NODE, socket_dir="/sockets")
    assert (found.port, found.socket_dir) == (port, "/sockets")
    assert found.advertised_url.endswith(f":{port}")
    return found


@pytest.mark.parametrize(
    ("on_network", "host", "listens", "advertised"),
    [
        (False, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (False, "0.0.0.0", "0.0.0.0", "127.0.0.1"),
        (True, "127.0.0.1", NODE, NODE),
        (True, "0.0.0.0", "0.0.0.0", NODE),
    ],
)
def test_a_replica_listens_where_the_gateway_reaches_it_and_no_wider_than_told(
    on_network: bool, host: str, listens: str, advertised: str
) -> None:
    found = settled(on_network=on_network, host=host)
    assert found.host == listens
    assert found.advertised_url == f"http://{advertised}:{found.port}"


def test_a_port_in_use_is_passed_over_by_a_step_that_no_neighbour_takes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", any_free_port("127.0.0.1")))
        taken.listen()
        port = taken.getsockname()[1]
        order = ReplicaOrder(settings=settings(port=port), on_network=False, folder="/", key="k")
        found = settle(order, node=NODE, socket_dir="/sockets").port
    assert found > port
    assert (found - port) % PORT_STEP == 0


class Run:
    """An actor that runs a scripted replica, and what it has told so far."""

    def __init__(self, model: Path) -> None:
        self.actor = ReplicaActor()
        self.told: list[FromActor] = []
        order = ReplicaOrder(
            settings=settings(
                port=any_free_port("127.0.0.1"),
                model_folder=str(model),
                dtype="auto",
                num_threads=1,
                executor="scripted",
                scripted={"num_blocks": 64},
                index_url=None,
            ),
            on_network=False,
            folder="/no/such/folder",
            key=KEY,
        )
        decoder: msgspec.msgpack.Decoder[FromActor] = msgspec.msgpack.Decoder(FromActor)

        def run() -> None:
            for message in self.actor.run(msgspec.msgpack.encode(order)):
                self.told.append(decoder.decode(message))

        self.thread = threading.Thread(target=run)
        self.thread.start()

    @property
    def placed(self) -> Placed | None:
        return self.told[0] if self.told and isinstance(self.told[0], Placed) else None

    @property
    def output(self) -> str:
        return b"".join(told.data for told in self.told if isinstance(told, Output)).decode()

    def serves(self) -> bool:
        return self.placed is not None and answers_ok(f"{self.placed.url}/health")


def socket_dirs() -> list[str]:
    return [str(path) for path in Path(tempfile.gettempdir()).glob(f"prefixfleet-{KEY}-*")]


def variables(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    pytest.importorskip("ray", reason="Ray is not installed")
    running = Run(tiny_folder(tmp_path / "tiny"))
    yield running
    if running.thread.is_alive() and running.placed is not None:
        os.kill(running.placed.pid, signal.SIGKILL)
    running.thread.join()


@pytest.mark.slow
async def test_an_actor_tells_where_its_replica_is_what_it_says_and_how_it_ends(run: Run) -> None:
    await until(run.serves, seconds=30)
    assert run.placed is not None
    assert b"CUDA_VISIBLE_DEVICES=" in variables(run.placed.pid), "no GPU that it has not asked for"
    run.actor.stop()
    await until(lambda: not run.thread.is_alive())
    assert run.told[-1] == Ended(code=0)
    assert "draining" in run.output
    assert run.output.splitlines()[-1].endswith("stopped cut_off=0")


@pytest.mark.slow
async def test_a_replica_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    left = tempfile.mkdtemp(prefix=f"prefixfleet-{KEY}-")  # as by an actor that was killed
    run = Run(tiny_folder(tmp_path / "tiny"))
    await until(run.serves, seconds=30)
    assert left not in socket_dirs()
    assert run.placed is not None
    processes = with_descendants({run.placed.pid})
    assert len(processes) > 1
    os.kill(run.placed.pid, signal.SIGKILL)
    await until(lambda: not run.thread.is_alive())
    assert run.told[-1] == Ended(code=-signal.SIGKILL)
    assert not [pid for pid in processes if is_alive(pid)]
    assert socket_dirs() == []


@pytest.mark.slow
async def test_a_replica_that_is_stopped_before_it_starts_does_not_stay(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    run = Run(tiny_folder(tmp_path / "tiny"))
    run.actor.stop()
    await until(lambda: not run.thread.is_alive(), seconds=30)
    assert isinstance(run.told[-1], Ended)

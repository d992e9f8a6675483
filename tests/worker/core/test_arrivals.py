"""Messages of a core, waited for on an event loop: none is lost or late, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from worker.core.arrivals import Arrivals

Sockets = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    """A socket that receives, and one that sends to it."""
    context = zmq.Context()
    outlet, inlet = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outlet.bind(f"ipc://{tmp_path}/socket")
    inlet.connect(f"ipc://{tmp_path}/socket")
    yield outlet, inlet
    outlet.close(linger=0)
    inlet.close(linger=0)
    context.term()


async def taken(arrivals: Arrivals, count: int) -> list[bytes]:
    async with asyncio.timeout(10):
        return [await arrivals.next() for _ in range(count)]


async def test_what_came_before_anybody_waited_is_there(sockets: Sockets) -> None:
    outlet, inlet = sockets
    inlet.send(b"early")
    outlet.poll(10_000)
    arrivals = Arrivals(outlet)
    assert await taken(arrivals, 1) == [b"early"]
    arrivals.stop()


async def test_bursts_and_single_messages_arrive_in_order(sockets: Sockets) -> None:
    outlet, inlet = sockets
    arrivals = Arrivals(outlet)
    for burst in (1, 500, 1, 3):
        waiting = asyncio.create_task(taken(arrivals, burst))
        await asyncio.sleep(0)
        for number in range(burst):
            inlet.send(b"%d" % number)
        assert await waiting == [b"%d" % number for number in range(burst)]
    arrivals.stop()


async def test_nobody_is_called_after_the_end(sockets: Sockets) -> None:
    outlet, _ = sockets
    arrivals = Arrivals(outlet)
    arrivals.stop()
    arrivals.stop()
    assert not asyncio.get_running_loop().remove_reader(outlet.FD)

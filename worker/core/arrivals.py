"""What a socket of a core brings, waited for on an event loop.

A look at the socket when its file descriptor says so costs less per message than a socket of
zmq.asyncio, which has futures and timers of its own. It knows no message.
"""

from __future__ import annotations

import asyncio

import zmq


class Arrivals:
    """The messages of one socket that only receives; made on the loop that waits for them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._may_be_more = asyncio.Event()
        self._may_be_more.set()
        # NOTE: zmq signals an edge, once for all that has arrived: who reads must read to the end.
        self._loop.add_reader(socket.FD, self._may_be_more.set)

    async def next(self) -> bytes:
        """Wait for a message and return it."""
        while not self._has_message:
            self._may_be_more.clear()
            # A message that came before the clearing is found now, a later one wakes.
            if not self._has_message:
                await self._may_be_more.wait()
        return self._socket.recv(zmq.NOBLOCK)

    @property
    def _has_message(self) -> bool:
        # To ask costs a tenth of the exception that a receive in vain would raise.
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def stop(self) -> None:
        """Look out no more; before the socket is closed. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)

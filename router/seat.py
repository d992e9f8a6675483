"""The seat of a gateway process: what its parent hands it, and how it asks the other processes.

Every process is a gateway of its own towards Redis, with its own id, limits' share and lease. Here
is only what they share on one machine: listeners, a folder of sockets, one recording.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec

from kvindex.foundation.errors import ConfigError

log = logging.getLogger("prefixfleet.router")

_ASK_TIMEOUT_S = 2.0


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the files of several processes one recording: its secret key and its start."""

    key: bytes
    started_at: float


class Seat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of one process. File descriptors are those of sockets that listen already.

    Process 0 alone has the admin listener. `folder` holds a socket of each process; that of a
    process exists from when it serves.
    """

    number: int
    num_processes: int
    client_fd: int
    admin_fd: int | None
    folder: str
    recording: Recording

    @property
    def is_alone(self) -> bool:
        """Whether it is the only process of its gateway."""
        return self.num_processes == 1

    @property
    def socket_file(self) -> Path:
        """Where this process answers the others."""
        return self.socket_of(self.number)

    def socket_of(self, number: int) -> Path:
        """Where a process answers the others."""
        return socket_of(Path(self.folder), number)


def socket_of(folder: Path, number: int) -> Path:
    """Return the socket of a process in the folder of its gateway."""
    return folder / f"{number}.sock"


def read_seat(data: bytes) -> Seat:
    """Decode what the parent wrote; raise ConfigError for anything else."""
    try:
        return msgspec.json.decode(data, type=Seat)
    except msgspec.DecodeError as error:
        raise ConfigError(f"standard input: {error}; `--seat` is for the parent process") from None


class Siblings:
    """The other processes of this gateway, as process 0 asks them for their share of an answer."""

    def __init__(self, seat: Seat, *, admin_key: str) -> None:
        self._seat = seat
        self._headers = {"authorization": f"Bearer {admin_key}"}

    async def ask(self, path: str) -> Mapping[int, bytes]:
        """Return what each of the others answers to a GET; one that does not answer is left out."""
        numbers = [n for n in range(self._seat.num_processes) if n != self._seat.number]
        answers = await asyncio.gather(*(self._ask(number, path) for number in numbers))
        return {
            number: answer
            for number, answer in zip(numbers, answers, strict=True)
            if answer is not None
        }

    async def _ask(self, number: int, path: str) -> bytes | None:
        connector = aiohttp.UnixConnector(str(self._seat.socket_of(number)))
        try:
            async with (
                asyncio.timeout(_ASK_TIMEOUT_S),
                aiohttp.ClientSession(connector=connector, headers=self._headers) as session,
                session.get(f"http://gateway{path}") as response,
            ):
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("process %d does not answer path=%s reason=%r", number, path, str(error))
            return None


def siblings_of(seat: Seat | None, *, admin_key: str) -> Siblings | None:
    """Return the other processes, for the one that answers the admin API for all."""
    if seat is None or seat.is_alone or seat.admin_fd is None:
        return None
    return Siblings(seat, admin_key=admin_key)

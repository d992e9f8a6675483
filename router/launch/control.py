"""How `prefixfleet reload` speaks to the running `up`: JSON lines over a Unix socket of its own.

One request, then what is done as it is done, then how it ended. Who may open the run directory may
ask. What a reload is, is the business of whoever serves it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError

log = logging.getLogger("prefixfleet.router.control")

_EXIT_FAILED = 1
_EXIT_CONFIG = 2
_EXIT_DEPENDENCY = 3
_CONNECT_TIMEOUT_S = 5.0


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take the configuration as it is now; with `dry_run` only say what that would do.

    `file` is the absolute path that the caller believes to be in use, None to leave it open;
    `overrides` are flags by dotted path, which hold until the fleet ends.
    """

    file: str | None = None
    overrides: dict[str, int] = {}
    dry_run: bool = False


class Said(msgspec.Struct, frozen=True, tag="said"):
    """One line of progress."""

    text: str


class Reloaded(msgspec.Struct, frozen=True, kw_only=True, tag="reloaded"):
    """The end of a reload: the steps that were planned, and whether they were taken."""

    steps: list[str]
    done: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The end of a reload that was refused or stopped."""

    message: str
    exit_code: int


Message = Said | Reloaded | Failed
Say = Callable[[str], None]
Reload = Callable[[ReloadRequest, Say], Awaitable[Reloaded]]

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Control:
    """Serves one caller at a time; a reload goes on when its caller has gone."""

    def __init__(self, file: Path, reload: Reload) -> None:
        self._file = file
        self._reload = reload
        self._server: asyncio.Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._file))

    async def close(self) -> None:
        """Listen no more, and break off the reload that runs."""
        if self._server is not None:
            self._server.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: Message) -> None:
            if not writer.is_closing():
                writer.write(_encoder.encode(message) + b"\n")

        try:
            request = msgspec.json.decode(await reader.readline(), type=ReloadRequest)
        except (msgspec.DecodeError, ValueError, OSError) as error:
            send(Failed(message=f"not understood: {error}", exit_code=_EXIT_CONFIG))
        else:
            if self._running is not None and not self._running.done():
                text = "a reload is under way; `prefixfleet status` shows the processes"
                send(Failed(message=text, exit_code=_EXIT_FAILED))
            else:
                self._running = asyncio.create_task(self._run(request, send), name="reload")
                await asyncio.wait({self._running})
        writer.close()

    async def _run(self, request: ReloadRequest, send: Callable[[Message], None]) -> None:
        end: Message
        try:
            end = await self._reload(request, lambda text: send(Said(text)))
        except PrefixFleetError as error:
            end = Failed(message=str(error), exit_code=_exit_code(error))
        except asyncio.CancelledError:
            send(Failed(message="the fleet is ending", exit_code=_EXIT_FAILED))
            raise
        except Exception as error:
            # The border of a task beside which a fleet serves.
            log.exception("reload failed")
            end = Failed(message=f"reload failed: {error!r}", exit_code=_EXIT_FAILED)
        send(end)


def _exit_code(error: PrefixFleetError) -> int:
    if isinstance(error, ConfigError):
        return _EXIT_CONFIG
    if isinstance(error, DependencyError):
        return _EXIT_DEPENDENCY
    code: int = getattr(error, "exit_code", _EXIT_FAILED)
    return code


def ask_reload(file: Path, request: ReloadRequest) -> Iterator[Message]:
    """Ask for a reload and yield what is said, its end last.

    Raises DependencyError when nobody answers.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(file))
            connection.sendall(_encoder.encode(request) + b"\n")
            connection.settimeout(None)  # A reload takes as long as the slowest stream.
            with connection.makefile("rb") as lines:
                for line in lines:
                    yield _decoder.decode(line)
        except (OSError, msgspec.DecodeError) as error:
            raise DependencyError(
                f"{file}: {error}; the fleet takes a reload once it is ready"
            ) from None

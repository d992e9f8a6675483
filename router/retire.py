"""The end of a gateway process whose successor serves already: nobody is refused or cut off.

It listens no more, answers what still comes over open connections and asks for each of these to be
closed, and leaves with its last stream. It knows nothing of the successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiohttp import web

from router.api.openai import GATEWAY
from router.request.admit import Admission

log = logging.getLogger("prefixfleet.router")

_POLL_S = 0.1


async def close_when_retiring(request: web.Request, response: web.StreamResponse) -> None:
    """Send a client's next request to the successor, as a hook before the headers are sent."""
    if request.app[GATEWAY].admission.retiring:
        response.headers["connection"] = "close"
        response.force_close()


async def retire(
    admission: Admission, runners: Sequence[web.AppRunner], *, stop: asyncio.Event, linger_s: float
) -> None:
    """Return when nobody needs this process any more, or when `stop` is set.

    A connection that is idle for all of `linger_s` is closed; a stream has the time it needs.
    """
    log.info("retiring requests=%d", admission.num_admitted)
    admission.retire()
    for runner in runners:
        for site in list(runner.sites):
            await site.stop()
    await _or_stop(_until(lambda: not _num_connections(runners)), stop, timeout_s=linger_s)
    for runner in runners:
        if runner.server is not None:
            runner.server.pre_shutdown()  # Closes what is idle, and the others after their answer.
    await _or_stop(admission.wait_idle(), stop, timeout_s=None)


def _num_connections(runners: Sequence[web.AppRunner]) -> int:
    return sum(len(runner.server.connections) for runner in runners if runner.server is not None)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (a list of aiohttp's)
        await asyncio.sleep(_POLL_S)


async def _or_stop(
    waiting: Coroutine[Any, Any, None], stop: asyncio.Event, *, timeout_s: float | None
) -> None:
    """Wait for something, for `stop`, or for the time to pass."""
    tasks = {asyncio.create_task(waiting), asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()

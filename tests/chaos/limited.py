"""A tenant that asks for as much as it can get, on every gateway, and counts what it got."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

_BODY = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4, "ignore_eos": True}
_PAUSE_S = 0.05


@asynccontextmanager
async def greedy_tenant(urls: Sequence[str], key: str) -> AsyncIterator[Counter[tuple[str, int]]]:
    """Ask every gateway without a pause; yields the answers so far by gateway and status.

    A gateway that hangs up counts as status 0.
    """
    answers: Counter[tuple[str, int]] = Counter()
    stop = asyncio.Event()
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def client(url: str) -> None:
            while not stop.is_set():
                answers[url, await _status(session, url)] += 1
                await asyncio.sleep(_PAUSE_S)  # Refusals are quick; the load is for the others.

        clients = [asyncio.create_task(client(url)) for url in urls for _ in range(2)]
        try:
            yield answers
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*clients), 60)


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    try:
        async with session.post(f"{url}/v1/completions", json=_BODY) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0

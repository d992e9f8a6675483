"""Clients that stream without a pause and know what every answer has to say.

The scripted executor is exact: a request's tokens depend on its prompt and seed alone, so one
undisturbed run tells what every later one must equal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

NUM_REQUESTS = 12
MAX_TOKENS = 120


def body(number: int) -> dict[str, Any]:
    """One of the requests: half are greedy, some have two choices, prompts share prefixes."""
    prompt = [(7 * i) % 250 for i in range(64 * (number % 4))]
    return {
        "model": "tiny",
        "prompt": [*prompt, number + 1, *range(20)],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
        "n": 2 if number % 3 == 0 else 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True)
class Answer:
    """What a client has read; `error` when the stream or the request failed."""

    texts: dict[int, str] = field(default_factory=dict)
    num_tokens: int | None = None
    is_done: bool = False
    error: str | None = None

    @property
    def content(self) -> tuple[dict[int, str], int | None, bool, str | None]:
        return self.texts, self.num_tokens, self.is_done, self.error


async def ask(session: aiohttp.ClientSession, url: str, key: str, number: int) -> Answer:
    """Stream one request to its end."""
    answer = Answer()
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/completions", json=body(number), headers=headers) as reply:
        if reply.status != 200:
            answer.error = f"{reply.status} {(await reply.text())[:200]}"
            return answer
        async for line in reply.content:
            if line.startswith(b"data: "):
                take(answer, line[6:].strip())
    return answer


def take(answer: Answer, data: bytes) -> None:
    if data == b"[DONE]":
        answer.is_done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
        return
    for choice in chunk["choices"]:
        text = answer.texts.get(choice["index"], "")
        answer.texts[choice["index"]] = text + choice["text"]
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]


@dataclass(slots=True)
class Load:
    """Answers so far, by request; `num_hung_up` counts connections that the gateway lost."""

    expected: list[Answer]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    num_hung_up: int = 0

    @property
    def wrong(self) -> list[tuple[int, Answer]]:
        """The answers that are not those of the undisturbed run."""
        return [
            (number, answer)
            for number, answer in self.answers
            if answer.content != self.expected[number].content
        ]


@asynccontextmanager
async def steady_load(
    url: str, keys: list[str], *, num_clients: int, other_url: str | None = None
) -> AsyncIterator[Load]:
    """Stream from `num_clients` at a time until the block ends, then let all of them finish.

    With `other_url` every second client prefers that gateway. A client whose gateway hangs up on it
    goes to the other one.
    """
    numbers, stop = count(), asyncio.Event()
    urls = [url, other_url or url]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        expected = [await ask(session, url, keys[0], i) for i in range(NUM_REQUESTS)]
        assert all(answer.is_done and answer.error is None for answer in expected), expected
        load = Load(expected)

        async def client(own: int) -> None:
            while not stop.is_set():
                number = next(numbers)
                key = keys[number % len(keys)]
                try:
                    answer = await ask(session, urls[own % 2], key, number % NUM_REQUESTS)
                except aiohttp.ClientError:
                    own += 1
                    load.num_hung_up += 1
                    await asyncio.sleep(0.2)
                    continue
                load.answers.append((number % NUM_REQUESTS, answer))

        clients = [asyncio.create_task(client(i)) for i in range(num_clients)]
        try:
            yield load
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*clients), 60)

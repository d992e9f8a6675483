"""Workloads for bench_fleet.py: what is asked, and when, drawn from a seed.

Each is a list of chats with instants; nothing of it depends on an answer, so every router gets the
same, to the letter: where blocks of tokens end in a prompt decides how much of it can be shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

Messages = list[dict[str, str]]
STEP_COST = {"base_s": 0.006, "per_prefill_token_s": 40e-6, "per_decode_s": 50e-6}
"""What a step of a scripted replica costs, in seconds."""

_WORDS = ("stone", "river", "paper", "window", "garden", "silver", "market", "winter", "letter")


class Arrival(msgspec.Struct, frozen=True):
    """One chat: seconds from the beginning, its messages, and how many tokens it wants."""

    at_s: float
    messages: Messages
    max_tokens: int


Workload = Callable[[random.Random, int], list[Arrival]]
"""(source, number of requests) -> arrivals at one request a second."""


def words(source: random.Random, count: int, title: str) -> str:
    """Return a title and words drawn behind it."""
    return f"{title} " + " ".join(
        f"{source.choice(_WORDS)}{source.randrange(90)}" for _ in range(count)
    )


def system_prompts(source: random.Random, count: int) -> list[Arrival]:
    """Four tenants, each with one long system prompt before short questions."""
    prompts = [words(source, 260, f"tenant {i}") for i in range(4)]
    return [
        Arrival(
            at_s,
            [
                {"role": "system", "content": source.choice(prompts)},
                {"role": "user", "content": words(source, 12, "question")},
            ],
            16,
        )
        for at_s in _poisson(source, count)
    ]


def chat(source: random.Random, count: int) -> list[Arrival]:
    """Conversations of six turns, each turn some time after the one before."""
    return _sessions(source, count, num_turns=6, first=60, more=40, pause_s=12.0)


def agents(source: random.Random, count: int) -> list[Arrival]:
    """Agents that share instructions and add to a long context again and again, quickly."""
    shared = words(source, 200, "tools")
    return _sessions(source, count, num_turns=10, first=20, more=30, pause_s=5.0, shared=shared)


def unique(source: random.Random, count: int) -> list[Arrival]:
    """Prompts that share nothing."""
    return [
        Arrival(at_s, [{"role": "user", "content": words(source, 150, f"request {i}")}], 16)
        for i, at_s in enumerate(_poisson(source, count))
    ]


WORKLOADS: dict[str, Workload] = {
    "system prompts": system_prompts,
    "chat": chat,
    "agents": agents,
    "unique": unique,
}


def _sessions(
    source: random.Random,
    count: int,
    *,
    num_turns: int,
    first: int,
    more: int,
    pause_s: float,
    shared: str | None = None,
) -> list[Arrival]:
    found = []
    starts = _poisson(source, -(-count // num_turns), rate=1 / num_turns)
    for i, start_s in enumerate(starts):
        messages: Messages = [] if shared is None else [{"role": "system", "content": shared}]
        messages.append({"role": "user", "content": words(source, first, f"session {i}")})
        at_s = start_s
        for _ in range(num_turns):
            found.append(Arrival(at_s, list(messages), 16))
            messages.append({"role": "assistant", "content": words(source, 12, "answer")})
            messages.append({"role": "user", "content": words(source, more, "and")})
            at_s += pause_s * source.uniform(0.5, 1.5)
    return sorted(found, key=lambda arrival: arrival.at_s)[:count]


def _poisson(source: random.Random, count: int, *, rate: float = 1.0) -> list[float]:
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += source.expovariate(rate)
        found.append(at_s)
    return found

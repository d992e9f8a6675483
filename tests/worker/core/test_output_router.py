"""How outputs reach their readers: in order, merged for slow ones, a large step in slices."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.frontend.logprobs import TokenLogprobs
from engine.messages import EngineOutput, FinishReason
from worker.core.output_router import OUTPUTS_PER_SLICE, OutputRouter


def scored(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids]


async def test_a_slow_reader_gets_everything_in_one_piece() -> None:
    router = OutputRouter()
    router.open("r")
    prompt = scored(7, 8)
    router.deliver(
        [
            EngineOutput(
                request_id="r",
                token_ids=[1],
                num_cached_tokens=16,
                logprobs=scored(1),
                prompt_logprobs=prompt,
            ),
            EngineOutput(request_id="r", token_ids=[2, 3], logprobs=scored(2, 3)),
            EngineOutput(request_id="r", token_ids=[4], logprobs=scored(4), finish_reason="stop"),
        ]
    )
    assert [output async for output in router.outputs("r")] == [
        EngineOutput(
            request_id="r",
            token_ids=[1, 2, 3, 4],
            num_cached_tokens=16,
            logprobs=scored(1, 2, 3, 4),
            prompt_logprobs=prompt,
            finish_reason="stop",
        )
    ]
    assert router.close("r")


async def test_tokens_come_by_the_dozen_but_for_the_first_and_the_last() -> None:
    router = OutputRouter()
    router.open("r", interval=12)
    read: list[list[int]] = []

    async def reader() -> None:
        async for output in router.outputs("r"):
            read.append(output.token_ids)

    reading = asyncio.create_task(reader())
    await asyncio.sleep(0)
    for i in range(30):
        reason: FinishReason | None = "length" if i == 29 else None
        router.deliver([EngineOutput(request_id="r", token_ids=[i], finish_reason=reason)])
        await asyncio.sleep(0)
    await reading
    assert read == [[0], [*range(1, 13)], [*range(13, 25)], [*range(25, 30)]]


async def test_what_has_come_is_told_after_a_second_even_if_it_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    router = OutputRouter()
    router.open("r", interval=12)
    outputs = aiter(router.outputs("r"))
    router.deliver([EngineOutput(request_id="r", token_ids=[0])])
    assert (await anext(outputs)).token_ids == [0]
    later = asyncio.ensure_future(anext(outputs))
    for after_s, token in ((0.9, 1), (0.1, 2)):
        await asyncio.sleep(0)
        assert not later.done()
        now += after_s
        router.deliver([EngineOutput(request_id="r", token_ids=[token])])
    assert (await later).token_ids == [1, 2]


@pytest.mark.parametrize(("num_outputs", "num_turns"), [(1, 0), (128, 0), (129, 1), (300, 2)])
async def test_others_get_their_turn_between_the_slices_of_a_large_step(
    num_outputs: int, num_turns: int
) -> None:
    router = OutputRouter()
    ids = [f"r{i}" for i in range(num_outputs)]
    for request_id in ids:
        router.open(request_id)
    turns = 0

    async def somebody_else() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(somebody_else())
    await asyncio.sleep(0)
    turns = 0
    await router.deliver_in_slices(
        [EngineOutput(request_id=i, token_ids=[5], finish_reason="length") for i in ids]
    )
    assert turns == num_turns
    other.cancel()
    assert [[o.token_ids async for o in router.outputs(i)] for i in ids] == [[[5]]] * num_outputs
    assert OUTPUTS_PER_SLICE == 128

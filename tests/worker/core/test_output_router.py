"""How outputs reach their readers: in order, merged for slow ones, a large step in slices."""

from __future__ import annotations

import asyncio

import pytest

from engine.frontend.logprobs import TokenLogprobs
from engine.messages import EngineOutput
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

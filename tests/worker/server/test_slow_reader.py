"""A client that reads slowly: its output waits for it, in bounded parts, and nothing is lost."""

from __future__ import annotations

from engine.frontend.encoder import Encoder
from engine.frontend.parse import parse_completion_request
from tests.engine.frontend.tiny_tokenizer import tiny_bundle
from tests.worker.server.replica import RunningReplica, running_replica, until
from worker.server.choices import ChoiceDelta, ChoiceRunner
from worker.server.generation import Generation, Preparer

BODY = b"""{"model": "tiny", "prompt": "the", "seed": 1, "n": 3, "max_tokens": 400,
            "ignore_eos": true, "logprobs": 1}"""
NUM_CHOICES, NUM_TOKENS = 3, 400
MAX_WAITING_DELTAS = 4 * NUM_CHOICES


def prepared(replica: RunningReplica) -> Generation:
    front = replica.front
    preparer = Preparer(
        front.prompts, replica.client.info, trusts_extension=False, rules=front.rules
    )
    return preparer.prepare(parse_completion_request(BODY), request_id="r")


async def test_a_reader_that_pauses_holds_a_few_deltas_and_then_gets_the_rest() -> None:
    async with running_replica() as replica:
        generation = prepared(replica)
        async with ChoiceRunner(replica.client, generation.choices) as runner:
            # Nobody reads until the engine has long finished.
            await until(lambda: replica.core.stats().generation_tokens_total == 1200)
            await until(lambda: replica.is_idle)
            folded = [len(choice.fold.token_ids) for choice in generation.choices]
            # Each choice waits with one more delta, beside those that lie ready.
            assert sum(folded) <= MAX_WAITING_DELTAS + NUM_CHOICES
            taken: list[ChoiceDelta] = []
            while not runner.finished:
                news = await runner.next()
                assert news is not None
                taken.append(news)
        # What came meanwhile was merged, so that the reader is soon at the end.
        assert len(taken) <= MAX_WAITING_DELTAS + 2 * NUM_CHOICES
        for choice in generation.choices:
            deltas = [news.delta for news in taken if news.choice is choice]
            assert sum(len(delta.token_ids) for delta in deltas) == NUM_TOKENS
            assert sum(len(delta.logprobs) for delta in deltas) == NUM_TOKENS
            assert "".join(delta.text for delta in deltas) == choice.fold.text


async def test_a_slow_reader_reads_the_same_as_a_quick_one() -> None:
    async with running_replica() as replica:
        _, quick = await replica.post("/v1/completions", BODY)
        generation = prepared(replica)
        async with ChoiceRunner(replica.client, generation.choices) as runner:
            await until(lambda: replica.core.stats().generation_tokens_total == 2400)
            while not runner.finished:
                await runner.next()
        texts = [choice.fold.text for choice in generation.choices]
        assert texts == [choice["text"] for choice in quick["choices"]]
        assert Encoder(tiny_bundle()).decode(generation.choices[0].fold.token_ids) == texts[0]

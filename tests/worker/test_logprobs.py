"""Log probabilities: those of single rows, and those that whole requests get from a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineOutput, EngineRequest
from kvindex.foundation.clock import VirtualClock
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    executor_for,
    load_reference,
    random_prompts,
    write_tiny_model,
)
from worker.runner.logprobs import logprobs_of

SCORED = SamplingParams(
    temperature=0.0, max_tokens=6, ignore_eos=True, seed=0, logprobs=3, prompt_logprobs=2
)
PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def served(
    core: EngineCore, requests: Sequence[tuple[list[int], SamplingParams]], *, name: str
) -> list[EngineOutput]:
    """Run requests to their ends; each one's outputs are merged into one."""
    found: dict[str, list[EngineOutput]] = {}
    for i, (prompt, sampling) in enumerate(requests):
        request_id = f"{name}-{i}"
        found[request_id] = []
        core.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found[output.request_id].append(output)
    core.step()
    return [
        EngineOutput(
            request_id=request_id,
            token_ids=[token for output in outputs for token in output.token_ids],
            logprobs=[entry for output in outputs for entry in output.logprobs],
            num_cached_tokens=outputs[0].num_cached_tokens,
            prompt_logprobs=outputs[0].prompt_logprobs,
        )
        for request_id, outputs in found.items()
    ]


def core_of(
    executor: Executor, *, max_num_batched_tokens: int = 512, async_depth: int = 0
) -> EngineCore:
    config = EngineConfig(
        check_integrity=True,
        max_num_batched_tokens=max_num_batched_tokens,
        async_depth=async_depth,
    )
    return EngineCore(config, executor, VirtualClock())


def reference(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the reference's log probabilities of every token behind the first, [tokens - 1]."""
    with torch.inference_mode():
        logits: torch.Tensor = load_reference(folder)(torch.tensor([list(tokens)])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def assert_close(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Same tokens and ranks everywhere, log probabilities as near as float32 sums are."""
    assert [e.token_id for e in found] == [e.token_id for e in expected]
    assert [e.rank for e in found] == [e.rank for e in expected]
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_an_entry_has_probability_rank_and_the_likeliest_others() -> None:
    probabilities = [0.1, 0.4, 0.2, 0.3]
    logits = torch.tensor([probabilities] * 3).log() + 5.0
    first, second, third = logprobs_of(logits, [2, 1, 0], [2, 0, 4])
    assert (first.token_id, first.rank) == (2, 3)
    assert first.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 3]
    assert [p for _, p in first.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)
    assert (second.rank, second.top) == (1, [])
    assert [token for token, _ in third.top] == [1, 3, 2, 0]


def test_more_alternatives_than_tokens_are_all_tokens_and_equals_share_the_lowest_rank() -> None:
    (entry,) = logprobs_of(torch.zeros(1, 3), [0], [20])
    assert (entry.rank, len(entry.top)) == (3, 3)


def test_many_rows_are_scored_as_few_are() -> None:
    logits = torch.randn(150, 30, generator=torch.Generator().manual_seed(0))
    tokens, num_top = [i % 30 for i in range(150)], [i % 4 for i in range(150)]
    whole = logprobs_of(logits, tokens, num_top)
    assert [
        logprobs_of(logits[i : i + 1], tokens[i : i + 1], num_top[i : i + 1])[0] for i in range(150)
    ] == whole


def test_prompt_and_output_are_scored_as_the_reference_scores_them(folder: Path) -> None:
    (prompt,) = random_prompts(1, lengths=[40], vocab_size=VOCAB_SIZE)
    (output,) = served(core_of(executor_for(folder)), [(prompt, SCORED)], name="r")
    scores = reference(folder, [*prompt, *output.token_ids]).tolist()
    assert output.prompt_logprobs is not None
    entries = [*output.prompt_logprobs, *output.logprobs]
    assert [entry.token_id for entry in entries] == [*prompt[1:], *output.token_ids]
    assert [entry.logprob for entry in entries] == pytest.approx(scores, abs=1e-3)
    assert {len(entry.top) for entry in output.prompt_logprobs} == {2}
    assert {len(entry.top) for entry in output.logprobs} == {3}
    assert [entry.rank for entry in output.logprobs] == [1] * 6


@pytest.mark.fault("engine-5")
def test_a_cached_prompt_is_scored_in_full_and_the_same_every_time(folder: Path) -> None:
    (prompt,) = random_prompts(1, lengths=[33], vocab_size=VOCAB_SIZE)
    core = core_of(executor_for(folder))
    (plain,) = served(core, [(prompt, PLAIN)], name="plain")
    first, second = (served(core, [(prompt, SCORED)], name=f"scored{i}")[0] for i in range(2))
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 32
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.logprobs == second.logprobs
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert first.token_ids == second.token_ids == plain.token_ids


@pytest.mark.fault("engine-5")
def test_a_scored_prompt_is_cached_for_those_who_follow(folder: Path) -> None:
    (prompt,) = random_prompts(1, lengths=[33], vocab_size=VOCAB_SIZE)
    core = core_of(executor_for(folder))
    served(core, [(prompt, SCORED)], name="scored")
    (plain,) = served(core, [(prompt, PLAIN)], name="plain")
    assert plain.num_cached_tokens == 32


@pytest.mark.fault("engine-5")
def test_choices_of_one_prompt_are_each_scored_in_full(folder: Path) -> None:
    (prompt,) = random_prompts(1, lengths=[33], vocab_size=VOCAB_SIZE)
    outputs = served(core_of(executor_for(folder)), [(prompt, SCORED)] * 3, name="n")
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 32


@pytest.mark.parametrize("async_depth", [0, 1])
def test_chunks_and_preemptions_change_nothing(folder: Path, async_depth: int) -> None:
    prompts = random_prompts(5, lengths=[50, 70, 90], vocab_size=VOCAB_SIZE)
    long = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, seed=0, logprobs=1, prompt_logprobs=1
    )
    alone = [
        served(core_of(executor_for(folder)), [(prompt, long)], name="alone")[0]
        for prompt in prompts
    ]
    tight = executor_for(folder, num_blocks=14, async_depth=async_depth)
    core = core_of(tight, max_num_batched_tokens=24, async_depth=async_depth)
    together = served(core, [(prompt, long) for prompt in prompts], name="together")
    assert core.counters.preemptions > 0
    for found, expected in zip(together, alone, strict=True):
        assert found.token_ids == expected.token_ids
        assert_close(found.logprobs, expected.logprobs)
        assert found.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        assert_close(found.prompt_logprobs, expected.prompt_logprobs)


def test_scores_are_the_models_own_whatever_is_sampled(folder: Path) -> None:
    (prompt,) = random_prompts(1, lengths=[20], vocab_size=VOCAB_SIZE)
    adjusting = SamplingParams(
        seed=4,
        temperature=1.7,
        max_tokens=8,
        ignore_eos=True,
        logprobs=0,
        allowed_token_ids=tuple(range(3, 60)),
        repetition_penalty=1.5,
    )
    (output,) = served(core_of(executor_for(folder)), [(prompt, adjusting)], name="r")
    assert set(output.token_ids) <= set(range(3, 60))
    scores = reference(folder, [*prompt, *output.token_ids])[len(prompt) - 1 :].tolist()
    assert [entry.logprob for entry in output.logprobs] == pytest.approx(scores, abs=1e-3)

"""Scored prompts in the scheduler: computed whole, cached for others, kept over preemptions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core import EngineCore
from engine.frontend.logprobs import TokenLogprobs
from engine.messages import EngineOutput, EngineRequest
from engine.scripted_logprobs import scripted_logprobs
from tests.engine.build import make_core, make_request

PROMPT = list(range(33))


def scored(request_id: str, prompt: Sequence[int], *, max_tokens: int = 4) -> EngineRequest:
    return make_request(
        request_id, list(prompt), max_tokens=max_tokens, prompt_logprobs=1, logprobs=0
    )


def expected(tokens: Sequence[int], *, num_top: int) -> list[TokenLogprobs]:
    return [scripted_logprobs(token, num_top, vocab_size=256) for token in tokens]


def outputs_of(core: EngineCore, *requests: EngineRequest) -> dict[str, list[EngineOutput]]:
    for request in requests:
        core.add(request)
    found: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            found[output.request_id].append(output)
    return found


def assert_scored(outputs: Sequence[EngineOutput], prompt: Sequence[int]) -> None:
    """The prompt's entries come once, with the first token; each token has its own."""
    assert outputs[0].prompt_logprobs == expected(prompt[1:], num_top=1)
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * (len(outputs) - 1)
    for output in outputs:
        assert output.logprobs == expected(output.token_ids, num_top=0)


@pytest.mark.fault("engine-5")
@pytest.mark.parametrize("budget", [4, 7, 32, 64])
@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_a_prompt_is_scored_over_chunks_of_any_size(budget: int, async_depth: int) -> None:
    core = make_core(budget=budget, async_depth=async_depth)
    for name in ("first", "again"):
        found = outputs_of(core, scored(name, PROMPT))[name]
        assert_scored(found, PROMPT)
        assert found[0].num_cached_tokens == 0


@pytest.mark.fault("engine-5")
def test_cached_blocks_are_not_read_for_a_score_but_written_for_others() -> None:
    core = make_core()
    assert outputs_of(core, scored("scored", PROMPT))["scored"][0].num_cached_tokens == 0
    plain = outputs_of(core, make_request("plain", PROMPT))["plain"]
    assert plain[0].num_cached_tokens == 32
    assert plain[0].prompt_logprobs is None
    assert plain[0].logprobs == []


def test_a_score_does_not_wait_for_a_prefix_that_it_would_not_read() -> None:
    core = make_core(budget=128)
    core.add(scored("a", PROMPT))
    core.add(scored("b", PROMPT))
    assert {output.request_id for output in core.step()} == {"a", "b"}


def test_a_prompt_of_one_token_has_no_scores() -> None:
    found = outputs_of(make_core(), scored("one", [7]))["one"]
    assert found[0].prompt_logprobs == []


@pytest.mark.parametrize("async_depth", [0, 1])
def test_scores_are_whole_after_preemptions(async_depth: int) -> None:
    core = make_core(num_blocks=25, budget=12, async_depth=async_depth)
    prompts = {f"r{i}": [(i * 37 + k) % 256 for k in range(30)] for i in range(4)}
    found = outputs_of(core, *(scored(name, p, max_tokens=40) for name, p in prompts.items()))
    assert core.counters.preemptions > 0
    for name, prompt in prompts.items():
        assert_scored(found[name], prompt)
        assert sum(len(output.token_ids) for output in found[name]) == 40


def test_scores_survive_steps_that_are_withdrawn() -> None:
    core = make_core(budget=8)
    core.add(scored("r", PROMPT))
    core.step()
    core.reset_prefix_cache(preempt_running=True)
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert_scored(outputs, PROMPT)

"""Prompts that arrive in parts: what is known is computed, nothing is sampled before the last."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from engine.core import EngineCore
from engine.frontend.errors import RequestError
from engine.messages import EngineRequest
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request, run
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core

PROMPT = list(range(30))
WHOLE = make_request("a", PROMPT, max_tokens=8)


def open_request(num_tokens: int) -> EngineRequest:
    """Return the first part of WHOLE."""
    return msgspec.structs.replace(WHOLE, prompt_token_ids=PROMPT[:num_tokens], prompt_is_open=True)


def settle(core: EngineCore, result: Run) -> None:
    """Step until nothing can go on before the prompt does."""
    for _ in range(100):
        if not core.has_work:
            return
        result.step()
    raise AssertionError("an open prompt keeps the engine busy")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("ends", [[1, 30], [7, 8, 9, 30], [16, 30, 30], [29, 30]])
def test_a_prompt_in_parts_gives_the_tokens_of_the_whole(depth: int, ends: list[int]) -> None:
    core = make_core(async_depth=depth, budget=6)
    core.add(open_request(ends[0]))
    result = Run(core)
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        settle(core, result)
        assert core.scheduler.requests["a"].num_computed_tokens == start - 1
        assert result.tokens == {}
        core.extend_prompt("a", PROMPT[start:end], is_last=i == len(ends) - 2)
    assert result.to_end().tokens["a"] == alone(WHOLE)
    assert core.stats().prompt_tokens_total == 30


def test_parts_that_arrive_while_waiting_or_preempted_are_not_lost() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_request("other", range(50, 60), max_tokens=6))
    result = Run(core)
    result.step()
    core.add(open_request(5))
    core.extend_prompt("a", PROMPT[5:12], is_last=False)
    settle(core, result)
    core.extend_prompt("a", PROMPT[12:20], is_last=False)
    assert core.reset_prefix_cache(preempt_running=True)
    core.extend_prompt("a", PROMPT[20:], is_last=True)
    assert result.to_end().tokens["a"] == alone(WHOLE)


def test_its_blocks_are_shared_like_any_others() -> None:
    core = make_core()
    core.add(open_request(18))
    result = Run(core)
    settle(core, result)
    twin = make_request("twin", PROMPT[:18], max_tokens=2)
    core.add(twin)
    settle(core, result)
    assert result.cached["twin"] == 4 * BLOCK_SIZE
    assert result.tokens["twin"] == alone(twin)
    core.extend_prompt("a", PROMPT[18:], is_last=True)
    assert result.to_end().tokens["a"] == alone(WHOLE)
    again = msgspec.structs.replace(WHOLE, request_id="again")
    assert run(core, again).cached["again"] == 28


def test_a_part_that_is_cached_whole_waits_for_the_next() -> None:
    core = make_core()
    run(core, make_request("warm", PROMPT, max_tokens=1))
    core.add(open_request(2 * BLOCK_SIZE + 1))
    result = Run(core)
    settle(core, result)
    core.extend_prompt("a", PROMPT[2 * BLOCK_SIZE + 1 :], is_last=True)
    assert result.to_end().tokens["a"] == alone(WHOLE)


@pytest.mark.parametrize("name", ["full+window", "full+state", "state alone"])
def test_other_cache_groups_take_parts_too(name: str) -> None:
    core = make_hybrid_core(GROUPS[name], budget=5)
    core.add(open_request(11))
    result = Run(core)
    settle(core, result)
    core.extend_prompt("a", PROMPT[11:], is_last=True)
    assert result.to_end().tokens["a"] == alone_with(GROUPS[name], WHOLE)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    core = make_core(max_model_len=32)
    core.extend_prompt("unknown", [1], is_last=True)
    core.add(open_request(5))
    with pytest.raises(RequestError, match="context length 32"):
        core.extend_prompt("a", [1] * 27, is_last=False)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        core.extend_prompt("a", [256], is_last=False)
    core.extend_prompt("a", PROMPT[5:], is_last=True)
    with pytest.raises(RequestError, match="complete already"):
        core.extend_prompt("a", [1], is_last=True)
    assert Run(core).to_end().finish["a"] == "length"
    whole_prompt = make_hybrid_core(GROUPS["full+cross"])
    with pytest.raises(RequestError, match="in one piece"):
        whole_prompt.add(open_request(5))


def test_it_gives_way_to_a_request_that_needs_its_blocks() -> None:
    core = make_core(num_blocks=12)
    core.add(open_request(20))
    result = Run(core)
    settle(core, result)
    other = make_request("other", range(60, 90), max_tokens=4)
    core.add(other)
    settle(core, result)
    assert result.tokens["other"] == alone(other)
    core.extend_prompt("a", PROMPT[20:], is_last=True)
    assert result.to_end().tokens["a"] == alone(WHOLE)


def test_nobody_waits_for_a_block_that_it_cannot_complete_yet() -> None:
    """Its last token would complete a block, but it is not computed before the prompt grows."""
    core = make_core()
    core.add(open_request(4 * BLOCK_SIZE))
    result = Run(core)
    settle(core, result)
    twin = make_request("twin", PROMPT[: 6 * BLOCK_SIZE], max_tokens=2)
    core.add(twin)
    settle(core, result)
    assert result.tokens["twin"] == alone(twin)
    core.extend_prompt("a", PROMPT[4 * BLOCK_SIZE :], is_last=True)
    assert result.to_end().tokens["a"] == alone(WHOLE)


def test_a_drained_engine_is_idle_although_a_prompt_is_open() -> None:
    core = make_core()
    core.add(open_request(20))
    result = Run(core)
    settle(core, result)
    core.pause("new")
    core.add(make_request("new", range(60, 70)))
    assert not core.has_work
    core.resume()
    settle(core, result)
    assert result.finish["new"] == "length"

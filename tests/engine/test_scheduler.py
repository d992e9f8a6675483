"""The scheduler: budgets, hits, pending hashes, preemption, aborts, stops."""

from __future__ import annotations

import pytest

from engine.executor import execute
from engine.frontend.errors import RequestError
from engine.request import RequestStatus
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request, run


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    core = make_core(budget=8)
    core.add(make_request("a", range(20)))
    counts = []
    while core.has_work:
        counts.append(core.scheduler.schedule().num_scheduled_tokens.get("a"))
        if len(counts) == 3:
            break
    assert counts == [8, 8, 4]


def test_decodes_go_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    core = make_core(budget=8)
    core.add(make_request("a", range(4), max_tokens=8))
    core.step()
    core.add(make_request("b", range(100, 120)))
    assert core.scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 7}


def test_the_number_of_running_requests_is_bounded() -> None:
    core = make_core(max_num_seqs=2)
    for i in range(3):
        core.add(make_request(f"r{i}", range(i * 50, i * 50 + 5), max_tokens=50))
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["r0", "r1"]
    assert [r.request_id for r in core.scheduler.waiting] == ["r2"]


@pytest.mark.fault("engine-4")
def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    core = make_core()
    prompt = range(2 * BLOCK_SIZE)
    first = run(core, make_request("a", prompt))
    second = run(core, make_request("b", prompt))
    assert (first.cached["a"], second.cached["b"]) == (0, BLOCK_SIZE)
    assert first.tokens["a"] == second.tokens["b"]


@pytest.mark.fault("engine-13")
def test_a_hit_needs_the_same_salt() -> None:
    core = make_core()
    prompt = range(5 * BLOCK_SIZE + 1)
    run(core, make_request("a", prompt, salt="a"))
    hits = {
        salt: run(core, make_request(f"r{salt}", prompt, salt=salt)).cached[f"r{salt}"]
        for salt in ("b", None, "a")
    }
    assert hits == {"b": 0, None: 0, "a": 5 * BLOCK_SIZE}


@pytest.mark.fault("engine-1")
def test_blocks_of_a_preempted_request_are_not_found_unless_they_were_written() -> None:
    """The victim loses its blocks after they were planned; a later request shares its prompt."""
    core = make_core(num_blocks=9, budget=64)
    prompt = list(range(4 * BLOCK_SIZE + 1))
    core.add(make_request("low", prompt, max_tokens=8))
    planned = core.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"low": len(prompt)}
    core.scheduler._preempt(core.scheduler.running[0])
    core.scheduler.update_from_output(planned, execute(core.executor, planned))
    assert core.kv_cache.pool.num_cached_hashes == 0
    core.scheduler.abort(["low"])
    twin = make_request("twin", prompt)
    assert run(core, twin).tokens["twin"] == alone(twin)


@pytest.mark.fault("engine-2")
def test_a_commit_belongs_to_the_allocation_that_was_planned() -> None:
    """The block was given back and handed out again before the old step returned."""
    core = make_core(num_blocks=6)
    core.add(make_request("a", range(2 * BLOCK_SIZE)))
    old = core.scheduler.schedule()
    core.abort(["a"])
    core.add(make_request("b", range(100, 100 + 5 * BLOCK_SIZE - 1)))
    core.scheduler.schedule()
    core.kv_cache.commit_step(old.step)
    assert core.kv_cache.pool.num_cached_hashes == 0


@pytest.mark.fault("engine-3")
def test_hits_that_are_free_count_as_needed_before_anything_is_touched() -> None:
    core = make_core(num_blocks=6)
    run(core, make_request("warm", range(3 * BLOCK_SIZE), max_tokens=1))
    hit_and_more = make_request("big", range(6 * BLOCK_SIZE - 1), max_tokens=1)
    with pytest.raises(RequestError, match="at most 19 leave room"):
        core.add(hit_and_more)
    core.add(make_request("holder", range(200, 200 + BLOCK_SIZE), max_tokens=3))
    core.step()
    core.add(make_request("fits-later", range(5 * BLOCK_SIZE - 1), max_tokens=1))
    free_before = core.kv_cache.pool.num_free
    core.step()
    assert core.scheduler.requests["fits-later"].status is RequestStatus.WAITING
    assert core.kv_cache.pool.num_free <= free_before
    assert Run(core).to_end().finish["fits-later"] == "length"


def test_siblings_wait_for_a_pending_prefix_and_compute_it_once() -> None:
    core = make_core(num_blocks=256, budget=16)
    shared = list(range(10 * BLOCK_SIZE))
    requests = [make_request(f"r{i}", [*shared, 200 + i, 201]) for i in range(16)]
    result = run(core, *requests)
    assert [result.cached[f"r{i}"] for i in range(16)] == [0] + [10 * BLOCK_SIZE] * 15
    assert core.counters.prefix_hits == 15 * 10 * BLOCK_SIZE
    assert all(result.tokens[r.request_id] == alone(r) for r in requests)


def test_others_pass_a_request_that_waits_for_a_pending_prefix() -> None:
    core = make_core(budget=12)
    shared = list(range(4 * BLOCK_SIZE))
    core.add(make_request("writer", shared))
    core.add(make_request("sibling", [*shared, 99]))
    core.add(make_request("other", [50]))
    first = core.scheduler.schedule()
    assert first.num_scheduled_tokens == {"writer": 12}
    core.scheduler.update_from_output(first, execute(core.executor, first))
    second = core.scheduler.schedule()
    assert second.num_scheduled_tokens == {"writer": 4, "other": 1}


def test_a_sibling_takes_over_when_the_writer_is_withdrawn() -> None:
    core = make_core(budget=8)
    shared = list(range(4 * BLOCK_SIZE))
    core.add(make_request("writer", shared))
    sibling = make_request("sibling", [*shared, 99])
    core.add(sibling)
    core.step()
    core.abort(["writer"])
    result = Run(core).to_end()
    assert result.cached["sibling"] == 2 * BLOCK_SIZE
    assert result.tokens["sibling"] == alone(sibling)


def test_the_newest_running_request_is_preempted_and_loses_little() -> None:
    core = make_core(num_blocks=9)
    old = make_request("old", range(3 * BLOCK_SIZE), max_tokens=16)
    new = make_request("new", range(50, 50 + 3 * BLOCK_SIZE), max_tokens=16)
    result = run(core, old, new)
    assert core.counters.preemptions >= 1
    assert result.tokens == {"old": alone(old), "new": alone(new)}


@pytest.mark.fault("engine-25")
def test_a_request_is_admitted_only_when_its_whole_prompt_fits() -> None:
    core = make_core(num_blocks=11, budget=4)
    core.add(make_request("a", range(4 * BLOCK_SIZE), max_tokens=8))
    core.step()
    core.add(make_request("b", range(50, 50 + 8 * BLOCK_SIZE), max_tokens=4))
    result = Run(core)
    while "a" not in result.finish:
        result.step()
        assert [r.request_id for r in core.scheduler.running[1:]] == []
    result.to_end()
    assert core.counters.preemptions == 0


@pytest.mark.fault("engine-28")
def test_cached_tokens_are_those_of_the_first_admission() -> None:
    core = make_core(num_blocks=9)
    first = make_request("old", range(3 * BLOCK_SIZE), max_tokens=16)
    second = make_request("new", range(50, 50 + 3 * BLOCK_SIZE), max_tokens=16)
    result = run(core, first, second)
    assert core.counters.preemptions >= 1
    assert result.cached == {"old": 0, "new": 0}
    assert core.counters.prefix_hits == 0
    assert core.counters.prefix_queries == 6 * BLOCK_SIZE


@pytest.mark.fault("engine-30")
def test_reset_with_running_requests_changes_no_output() -> None:
    core = make_core()
    request = make_request("a", range(9), max_tokens=12)
    core.add(request)
    result = Run(core)
    for _ in range(4):
        result.step()
    assert not core.reset_prefix_cache(preempt_running=False)
    assert core.reset_prefix_cache(preempt_running=True)
    assert core.snapshot_entries() == []
    assert result.to_end().tokens["a"] == alone(request)


@pytest.mark.fault("engine-35")
def test_aborts_at_every_stage_leave_nothing_behind() -> None:
    core = make_core(num_blocks=12, budget=8)
    core.abort(["unknown"])
    core.add(make_request("before", range(10)))
    core.abort(["before"])
    core.add(make_request("during", range(10)))
    scheduled = core.scheduler.schedule()
    core.abort(["during"])
    output = execute(core.executor, scheduled)
    assert core.scheduler.update_from_output(scheduled, output) == []
    done = run(core, make_request("after", range(10)))
    core.abort(["after", "during", "before"])
    assert done.finish == {"after": "length"}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


def test_an_id_can_be_used_again_at_once_after_its_abort() -> None:
    core = make_core(budget=8)
    core.add(make_request("a", range(30)))
    core.step()
    core.abort(["a"])
    again = make_request("a", range(70, 80))
    assert run(core, again).tokens["a"] == alone(again)


@pytest.mark.fault("engine-11")
def test_a_live_id_is_refused_and_the_first_request_goes_on() -> None:
    core = make_core()
    first = make_request("a", range(10))
    core.add(first)
    with pytest.raises(RequestError, match="in use"):
        core.add(make_request("a", range(10)))
    assert Run(core).to_end().tokens["a"] == alone(first)


def test_resumed_tokens_count_as_output() -> None:
    request = make_request("a", range(10), max_tokens=10)
    whole = alone(request)
    resumed = make_request("b", range(10), max_tokens=10, resume=whole[:6])
    result = run(make_core(), resumed)
    assert result.tokens["b"] == whole[6:]
    assert result.finish["b"] == "length"


def test_a_stop_token_ends_the_request_and_is_named() -> None:
    tokens = alone(make_request("a", range(10), max_tokens=8))
    stop = tokens[3]
    core = make_core()
    core.add(make_request("b", range(10), max_tokens=8, stop_token_ids=[stop]))
    outputs = []
    while core.has_work:
        outputs.extend(core.step())
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id == stop
    assert [t for o in outputs for t in o.token_ids] == tokens[: tokens.index(stop) + 1]


@pytest.mark.fault("engine-32")
def test_no_stop_token_comes_before_min_tokens() -> None:
    tokens = alone(make_request("a", range(10), max_tokens=8))
    eos = (tokens[0], tokens[1])
    result = run(make_core(), make_request("b", range(10), max_tokens=8, min_tokens=5, eos=eos))
    assert len(result.tokens["b"]) >= 5
    assert not set(result.tokens["b"][:5]) & set(eos)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    tokens = alone(make_request("a", range(10), max_tokens=8))
    request = make_request("b", range(10), max_tokens=8, eos=(tokens[2],), ignore_eos=True)
    assert run(make_core(), request).tokens["b"] == tokens


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize("token_id", [-1, 256, 1 << 40])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    core = make_core()
    with pytest.raises(RequestError, match="outside the vocabulary of 256"):
        core.add(make_request("a", [1, token_id]))
    with pytest.raises(RequestError, match="outside the vocabulary of 256"):
        core.add(make_request("b", [1], stop_token_ids=[token_id]))
    assert not core.has_work


def test_what_can_never_fit_is_refused_at_once() -> None:
    core = make_core(num_blocks=4)
    with pytest.raises(RequestError, match="at most 11 leave room") as caught:
        core.add(make_request("a", range(12)))
    assert caught.value.kind == "context_length_exceeded"


def test_the_queue_is_bounded() -> None:
    core = make_core(max_num_seqs=1)
    for i in range(core.config.max_num_queued_reqs):
        core.add(make_request(f"r{i}", [1]))
    with pytest.raises(RequestError) as caught:
        core.add(make_request("last", [1]))
    assert (caught.value.kind, caught.value.retry_after_s) == ("overloaded", 1.0)


def test_output_ends_at_the_context_length() -> None:
    core = make_core(max_model_len=12)
    result = run(core, make_request("a", range(8), max_tokens=100))
    assert (len(result.tokens["a"]), result.finish["a"]) == (4, "length")

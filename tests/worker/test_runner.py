"""The model runner: state over steps, and requests that cannot harm each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.executor import execute
from engine.frontend.sampling_params import SamplingParams
from engine.output import NewRequestData
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    executor_for,
    new_request,
    random_prompts,
    step_of,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor

POISON = VOCAB_SIZE - 1
PROMPTS = random_prompts(3, lengths=[20, 30, 40], vocab_size=POISON)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> UniprocExecutor:
    """A model in which one token, POISON, has an embedding that is not a number."""
    folder = write_tiny_model(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return executor_for(folder, num_blocks=64)


def first_token(executor: UniprocExecutor, prompt: list[int], block_ids: list[int]) -> int:
    """Prefill a prompt alone and return its first token."""
    step = step_of(new=[new_request("alone", prompt, block_ids)], scheduled={"alone": len(prompt)})
    output = execute(executor, step)
    execute(executor, step_of(dropped=["alone"]))
    return output.sampled_token_ids["alone"][0]


def test_a_chunk_short_of_the_last_token_samples_nothing(executor: UniprocExecutor) -> None:
    prompt = PROMPTS[0]
    first = execute(executor, step_of(new=[new_request("a", prompt, [3])], scheduled={"a": 16}))
    assert first.sampled_token_ids == {}
    second = execute(executor, step_of(blocks={"a": [9]}, scheduled={"a": 4}, computed={"a": 16}))
    execute(executor, step_of(dropped=["a"]))
    assert second.sampled_token_ids == {"a": [first_token(executor, prompt, [20, 21])]}


def test_a_step_without_tokens_only_drops(executor: UniprocExecutor) -> None:
    execute(executor, step_of(new=[new_request("a", PROMPTS[0], [1, 2])], scheduled={"a": 20}))
    output = execute(executor, step_of(dropped=["a", "never-seen"]))
    assert output.sampled_token_ids == {}
    assert output.errors == {}


def test_a_preempted_request_may_leave_and_return_in_one_step(executor: UniprocExecutor) -> None:
    prompt = PROMPTS[1]
    expected = first_token(executor, prompt, [1, 2])
    execute(executor, step_of(new=[new_request("a", prompt, [4, 5])], scheduled={"a": 17}))
    again = step_of(
        dropped=["a"], new=[new_request("a", prompt, [6, 7])], scheduled={"a": len(prompt)}
    )
    assert execute(executor, again).sampled_token_ids == {"a": [expected]}
    execute(executor, step_of(dropped=["a"]))


def test_a_request_that_starts_on_cached_blocks_reads_them(executor: UniprocExecutor) -> None:
    prompt = PROMPTS[2]
    expected = first_token(executor, prompt, [10, 11, 12])
    step = step_of(
        new=[new_request("b", prompt, [10, 11, 30], num_computed=32)], scheduled={"b": 8}
    )
    assert execute(executor, step).sampled_token_ids == {"b": [expected]}
    execute(executor, step_of(dropped=["b"]))


def test_logits_that_are_not_finite_fail_their_request_alone(executor: UniprocExecutor) -> None:
    expected = [first_token(executor, prompt, [1, 2, 3]) for prompt in PROMPTS]
    poisoned = [*PROMPTS[0], POISON]
    new = [
        new_request("good-0", PROMPTS[0], [1, 2]),
        new_request("bad", poisoned, [3, 4]),
        new_request("good-1", PROMPTS[1], [5, 6]),
        new_request("good-2", PROMPTS[2], [7, 8, 9]),
    ]
    output = execute(
        executor, step_of(new=new, scheduled={r.request_id: len(r.token_ids) for r in new})
    )
    assert output.errors == {"bad": "the logits of output token 0 are not finite"}
    assert output.sampled_token_ids == {f"good-{i}": [expected[i]] for i in range(3)}
    execute(executor, step_of(dropped=[r.request_id for r in new]))


def test_blocks_of_a_failed_request_do_not_poison_who_gets_them_next(
    executor: UniprocExecutor,
) -> None:
    short, long = PROMPTS[0][:5], PROMPTS[2]
    clean = _decode_two(executor, short, long, [[20], [21, 22, 23]])
    poison = [POISON] * 48
    execute(executor, step_of(new=[new_request("bad", poison, [1, 2, 3])], scheduled={"bad": 48}))
    execute(executor, step_of(dropped=["bad"]))
    # The short request's decode is padded to the length of the long one.
    assert _decode_two(executor, short, long, [[1], [2, 3, 4]]) == clean


def _decode_two(
    executor: UniprocExecutor, short: list[int], long: list[int], block_ids: list[list[int]]
) -> dict[str, list[int]]:
    new = [new_request("s", short, block_ids[0]), new_request("l", long, block_ids[1])]
    execute(executor, step_of(new=new, scheduled={"s": len(short), "l": len(long)}))
    output = execute(executor, step_of(scheduled={"s": 1, "l": 1}))
    execute(executor, step_of(dropped=["s", "l"]))
    assert output.errors == {}
    return output.sampled_token_ids


def test_progress_that_differs_from_the_schedulers_is_refused(executor: UniprocExecutor) -> None:
    execute(executor, step_of(new=[new_request("a", PROMPTS[0], [1, 2])], scheduled={"a": 16}))
    with pytest.raises(AssertionError, match="a has 16 tokens computed here, 12 in the scheduler"):
        execute(executor, step_of(scheduled={"a": 4}, computed={"a": 12}))
    execute(executor, step_of(dropped=["a"]))


def test_resumed_outputs_count_as_outputs(executor: UniprocExecutor) -> None:
    """With eight of its tokens being outputs, min_tokens=8 no longer masks the best token."""
    prompt = PROMPTS[0]
    best = first_token(executor, prompt, [1, 2])
    for min_tokens, stops in ((8, True), (9, False)):
        request = NewRequestData(
            request_id="a",
            token_ids=prompt,
            num_prompt_tokens=len(prompt) - 8,
            num_computed_tokens=0,
            block_ids=[[1, 2]],
            sampling=SamplingParams(temperature=0.0, min_tokens=min_tokens),
            eos_token_ids=(best,),
        )
        output = execute(executor, step_of(new=[request], scheduled={"a": len(prompt)}))
        assert (output.sampled_token_ids["a"] == [best]) is stops
        execute(executor, step_of(dropped=["a"]))


def test_a_closed_executor_gives_its_memory_back_and_may_be_closed_again(tmp_path: Path) -> None:
    executor = executor_for(write_tiny_model(tmp_path))
    executor.close()
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        execute(executor, step_of())


def test_the_execution_digest_tells_weights_and_precision_apart(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    digests = [executor_for(folder, dtype=d).info.execution_digest for d in ("float32", "bfloat16")]
    assert executor_for(folder).info.execution_digest == digests[0]
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += torch.finfo(torch.float32).eps
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    digests.append(executor_for(folder).info.execution_digest)
    assert len(set(digests)) == 3

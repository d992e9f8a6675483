"""The offline API: lists of prompts on an engine of its own, without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.frontend.errors import RequestError
from engine.frontend.stop import find_stop
from kvindex.foundation.errors import ConfigError
from tests.engine.frontend.tiny_tokenizer import (
    BOS_ID,
    IM_START_ID,
    VOCAB_SIZE,
    write_model_folder,
)
from tests.worker.core.build import children, exists
from worker.offline import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), executor="scripted", max_num_seqs=4) as made:
        yield made


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(30)]  # more than the engine is given at once
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts[:3]]
    assert [result.token_ids for result in together[:3]] == [one.token_ids for one in alone]
    assert len(together) == 30
    for prompt, result in zip(prompts, together, strict=True):
        assert result.prompt_token_ids == [
            BOS_ID,
            *llm.encoder.encode(prompt, add_special_tokens=False),
        ]
        assert result.text == llm.encoder.decode(result.token_ids)
        assert (len(result.token_ids), result.finish_reason) == (20, "length")


def test_token_ids_are_a_prompt_and_no_prompts_are_no_results(llm: LLM) -> None:
    assert llm.generate([5, 6, 7], GREEDY)[0].prompt_token_ids == [5, 6, 7]
    assert [r.prompt_token_ids for r in llm.generate([[5], [6, 7]], GREEDY)] == [[5], [6, 7]]
    assert llm.generate([]) == []


def test_a_repeated_prompt_is_cached(llm: LLM) -> None:
    prompt = [(3 * i) % 200 for i in range(50)]
    assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 48]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short = msgspec.structs.replace(GREEDY, max_tokens=3)
    results = llm.generate(["a", "b"], [GREEDY, short])
    assert [len(result.token_ids) for result in results] == [20, 3]


def test_choices_differ_by_their_draws_and_repeat_with_their_seed(llm: LLM) -> None:
    sampling = SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate("hello", sampling, n=3)[0] for _ in range(2))
    assert first.choices == again.choices
    assert len({tuple(choice.token_ids) for choice in first.choices}) == 3


def test_a_program_draws_the_same_whenever_it_runs(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    drawn = []
    for seed in (1, 1, 2):
        with LLM(str(folder), executor="scripted", seed=seed) as llm:
            drawn.append([result.token_ids for result in llm.generate(["a", "a"], sampling)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_a_conversation_is_answered_behind_the_models_template(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(turns, GREEDY)
    assert one.prompt_token_ids[:2] == [BOS_ID, IM_START_ID]
    assert [result.token_ids for result in llm.chat([turns, turns], GREEDY)] == [one.token_ids] * 2


def test_a_stop_string_ends_one_choice_and_its_work(llm: LLM) -> None:
    (whole,) = llm.generate("a", msgspec.structs.replace(GREEDY, max_tokens=400))
    stop = next(character for character in whole.text[5:] if character.isascii())
    (cut,) = llm.generate("a", msgspec.structs.replace(GREEDY, max_tokens=400, stop=(stop,)))
    match = find_stop(whole.text, [stop], searched=0, scan_from=0)
    assert match is not None
    assert (cut.text, cut.finish_reason) == (whole.text[: match.start], "stop")
    assert cut.choices[0].stop_reason == stop
    assert llm.generate("b", GREEDY)[0].finish_reason == "length"


def test_log_probabilities_of_prompt_and_output_come_on_request(llm: LLM) -> None:
    (result,) = llm.generate(
        [5, 6, 7], msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    )
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert result.prompt_logprobs is not None
    assert [(e.token_id, len(e.top)) for e in result.prompt_logprobs] == [(6, 1), (7, 1)]
    assert llm.generate([5, 6, 7], GREEDY)[0].logprobs == []


def test_a_prompt_that_cannot_be_served_is_named_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: has 600 tokens; at most 511 leave room"):
        llm.generate([[1], [1] * 600], GREEDY)
    with pytest.raises(RequestError, match=rf"prompt\[1\]\[0\]: token id {VOCAB_SIZE} is not in"):
        llm.generate([[1], [VOCAB_SIZE]], GREEDY)
    with pytest.raises(RequestError, match="sampling: 1 for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.generate("a", GREEDY)) == 1


def test_an_unknown_setting_is_refused_before_anything_starts(folder: Path) -> None:
    with pytest.raises(ConfigError, match="LLM: Object contains unknown field `max_seqs`"):
        LLM(str(folder), executor="scripted", max_seqs=3)


def test_nothing_is_left_of_a_closed_one(folder: Path) -> None:
    before = children()
    llm = LLM(str(folder), executor="scripted")
    (pid,) = children() - before
    llm.close()
    llm.close()
    assert not exists(pid)
    with pytest.raises(RequestError, match="the engine was closed"):
        llm.generate("a", GREEDY)


def test_the_caller_needs_no_torch_and_a_pipe_sees_no_progress_bar(folder: Path) -> None:
    program = (
        "import sys\n"
        "from worker.offline import LLM, SamplingParams\n"
        f"with LLM({str(folder)!r}, executor='scripted') as llm:\n"
        "    print(len(llm.generate(['a', 'b'], SamplingParams(max_tokens=3, ignore_eos=True))))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "generating" not in done.stderr

"""What requests do to logits before a token is chosen: allow, ban, bias, penalise, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.frontend.sampling_params import SamplingParams
from engine.output import NewRequestData
from tests.worker.sampling_fixtures import CHI_SQUARE_LIMITS, chi_square, drawn, rows_of
from worker.runner.adjust import adjust
from worker.runner.request_state import RequestTable
from worker.runner.sampler import sample
from worker.runner.sampling_state import SamplingTable

INF = math.inf
PROBABILITIES = [0.05, 0.12, 0.03, 0.02, 0.5, 0.28]


def adjusted(
    logits: Sequence[float],
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    eos: tuple[int, ...] = (),
) -> list[float]:
    rows = rows_of([(sampling, prompt, outputs)], vocab_size=len(logits), eos=eos)
    found: list[float] = adjust(torch.tensor([list(logits)]), rows)[0].tolist()
    return found


def test_only_allowed_tokens_stay() -> None:
    sampling = SamplingParams(allowed_token_ids=(3, 1))
    assert adjusted([1.0, 2.0, 3.0, 4.0], sampling) == [-INF, 2.0, -INF, 4.0]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], [1.0, 2.0, 3.0, -INF]),
        ([1], [1.0, 2.0, -INF, -INF]),
        ([0, 1], [-INF, 2.0, -INF, -INF]),
        ([1, 0], [1.0, 2.0, 3.0, -INF]),
    ],
)
def test_a_bad_word_is_banned_where_its_last_token_would_complete_it(
    outputs: list[int], expected: list[float]
) -> None:
    sampling = SamplingParams(bad_words=((3,), (1, 2), (0, 1, 0)))
    assert adjusted([1.0, 2.0, 3.0, 4.0], sampling, prompt=[0, 1], outputs=outputs) == expected


def test_stop_tokens_are_banned_until_min_tokens_and_a_bias_does_not_bring_them_back() -> None:
    sampling = SamplingParams(min_tokens=1, stop_token_ids=(2,), logit_bias=((2, 100.0), (1, -3.0)))
    assert adjusted([1.0, 2.0, 3.0], sampling, eos=(0,)) == [-INF, -1.0, -INF]
    assert adjusted([1.0, 2.0, 3.0], sampling, outputs=[1], eos=(0,)) == [1.0, -1.0, 103.0]


def test_repetition_counts_prompt_and_output_the_others_output_alone() -> None:
    logits = [2.0, 2.0, -2.0, 4.0]
    prompt, outputs = [0, 0, 2], [1, 1, 2]
    repetition = SamplingParams(repetition_penalty=2.0)
    assert adjusted(logits, repetition, prompt=prompt, outputs=outputs) == [1.0, 1.0, -4.0, 4.0]
    frequency = SamplingParams(frequency_penalty=0.5)
    assert adjusted(logits, frequency, prompt=prompt, outputs=outputs) == [2.0, 1.0, -2.5, 4.0]
    presence = SamplingParams(presence_penalty=-0.5)
    assert adjusted(logits, presence, prompt=prompt, outputs=outputs) == [2.0, 2.5, -1.5, 4.0]


def test_the_bias_comes_before_the_penalties_and_repetition_before_the_others() -> None:
    sampling = SamplingParams(
        logit_bias=((1, 3.0),),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    # ((1 + 3) / 2) - 2 * 0.5 - 0.25
    assert adjusted([0.5, 1.0], sampling, prompt=[1], outputs=[1, 1]) == [0.5, 0.75]


def test_a_ban_that_would_leave_nothing_is_lifted() -> None:
    banned = SamplingParams(allowed_token_ids=(1,), bad_words=((1,),))
    assert adjusted([1.0, 2.0], banned) == [-INF, 2.0]
    ending = SamplingParams(min_tokens=3)
    assert adjusted([1.0, -INF], ending, eos=(0,)) == [1.0, -INF]
    # A grammar has ruled out token 1.
    excluded = SamplingParams(allowed_token_ids=(1,))
    assert adjusted([1.0, -INF], excluded) == [1.0, -INF]


def test_logits_that_nobody_adjusts_are_passed_on_as_they_are() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    rows = rows_of([(SamplingParams(min_p=0.5, top_k=1), [0], [])], vocab_size=2)
    assert adjust(logits, rows) is logits


def test_rows_are_adjusted_beside_others_as_they_are_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 40, generator=generator) * 3
    before = logits.clone()
    requests: list[tuple[SamplingParams, list[int], list[int]]] = [
        (SamplingParams(), [1, 2], [3]),
        (SamplingParams(allowed_token_ids=(5, 6), bad_words=((5,),)), [1], []),
        (SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), [1, 2], [3, 3, 4]),
        (SamplingParams(repetition_penalty=1.3, logit_bias=((7, 2.0),)), [9, 8], [7, 7]),
        (SamplingParams(min_tokens=5, stop_token_ids=(4, 5)), [1], [2]),
        (SamplingParams(bad_words=((3, 4), (4,))), [1], [3]),
    ]
    together = adjust(logits, rows_of(requests, vocab_size=40))
    for i, request in enumerate(requests):
        alone = adjust(logits[i : i + 1], rows_of([request], vocab_size=40))
        assert torch.equal(together[i], alone[0])
    assert torch.equal(logits, before)


def test_a_row_behind_drafts_sees_them_as_outputs() -> None:
    running = RequestTable(max_num_seqs=1, max_model_len=16, block_size=16)
    table = SamplingTable(running, vocab_size=4)
    sampling = SamplingParams(
        temperature=0.0,
        bad_words=((1, 2),),
        presence_penalty=1.0,
        min_tokens=3,
        stop_token_ids=(0,),
    )
    request = NewRequestData(
        request_id="r",
        token_ids=[3, 3, 1],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=[[1]],
        sampling=sampling,
    )
    slot = running.add(request)
    table.set(slot, request)
    running.token_ids[slot, 3:5] = [1, 2]  # two drafts behind the one output
    rows = table.rows(np.full(3, slot), np.array([1, 2, 3]))
    found = adjust(torch.tensor([[5.0, 2.0, 3.0, 1.0]] * 3), rows).tolist()
    assert found == [
        [-INF, 1.0, -INF, 1.0],
        [-INF, 1.0, -INF, 1.0],
        [5.0, 1.0, 2.0, 1.0],
    ]
    assert sample(torch.tensor([[5.0, 2.0, 3.0, 1.0]] * 3), rows).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(seed=1, min_p=0.1), [0.05, 0.12, 0, 0, 0.5, 0.28]),
        (SamplingParams(seed=2, min_p=0.25), [0, 0, 0, 0, 0.5, 0.28]),
        (SamplingParams(seed=3, min_p=0.2, top_k=2), [0, 0, 0, 0, 0.5, 0.28]),
        # The best two are 0.87 of the best three, so top-p keeps the third.
        (SamplingParams(seed=4, min_p=0.2, top_k=3, top_p=0.9), [0, 0.12, 0, 0, 0.5, 0.28]),
        (SamplingParams(seed=5, allowed_token_ids=(0, 1, 3)), [0.05, 0.12, 0, 0.02, 0, 0]),
        (SamplingParams(seed=6, bad_words=((4,), (5,))), [0.05, 0.12, 0.03, 0.02, 0, 0]),
        (
            SamplingParams(seed=7, logit_bias=((3, math.log(10.0)), (4, -math.log(5.0)))),
            [0.05, 0.12, 0.03, 0.2, 0.1, 0.28],
        ),
        (
            SamplingParams(seed=8, presence_penalty=math.log(2.0)),
            [0.05, 0.06, 0.03, 0.02, 0.25, 0.28],
        ),
        (
            SamplingParams(seed=9, frequency_penalty=math.log(2.0)),
            [0.05, 0.03, 0.03, 0.02, 0.25, 0.28],
        ),
        # The logits are below zero, so a repetition squares the probability.
        (
            SamplingParams(seed=10, repetition_penalty=2.0),
            [0.05**2, 0.12**2, 0.03, 0.02, 0.5**2, 0.28],
        ),
        (
            SamplingParams(seed=11, min_tokens=9, stop_token_ids=(4,)),
            [0.05, 0.12, 0.03, 0.02, 0, 0.28],
        ),
    ],
)
def test_draws_follow_the_adjusted_distribution(
    sampling: SamplingParams, expected: list[float]
) -> None:
    logits = np.log(PROBABILITIES).tolist()
    tokens = drawn(logits, sampling, count=3_000, prompt=[0], outputs=[1, 1, 4])
    freedom = sum(1 for probability in expected if probability) - 1
    assert chi_square(tokens, expected) < CHI_SQUARE_LIMITS[freedom]


def test_min_p_is_measured_after_the_temperature() -> None:
    logits = np.log(PROBABILITIES).tolist()
    tokens = drawn(logits, SamplingParams(seed=1, min_p=0.3, temperature=2.0), count=4_000)
    # Square roots: 0.05 becomes 0.316 of the best one, 0.03 only 0.245.
    expected = [p**0.5 if p >= 0.05 else 0.0 for p in PROBABILITIES]
    assert chi_square(tokens, expected) < CHI_SQUARE_LIMITS[3]

"""Requests in a sampling table without a model, and draws from one stated distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from engine.frontend.sampling_params import SamplingParams
from engine.output import NewRequestData
from worker.runner.request_state import RequestTable
from worker.runner.sampler import sample
from worker.runner.sampling_state import SamplingRows, SamplingTable


def rows_of(
    requests: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]],
    *,
    vocab_size: int,
    eos: tuple[int, ...] = (),
    repeated: int = 1,
) -> SamplingRows:
    """One row per request, given as (parameters, prompt, outputs), or several alike."""
    longest = max(len(prompt) + len(outputs) for _, prompt, outputs in requests)
    running = RequestTable(max_num_seqs=len(requests), max_model_len=longest, block_size=16)
    table = SamplingTable(running, vocab_size=vocab_size)
    for i, (sampling, prompt, outputs) in enumerate(requests):
        request = NewRequestData(
            request_id=str(i),
            token_ids=[*prompt, *outputs],
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=[[1]],
            sampling=sampling,
            eos_token_ids=eos,
        )
        table.set(running.add(request), request)
    slots = running.slots([str(i) for i in range(len(requests))])
    num_outputs = np.array([len(outputs) for *_, outputs in requests])
    return table.rows(np.repeat(slots, repeated), np.repeat(num_outputs, repeated))


def drawn(
    logits: Sequence[float],
    sampling: SamplingParams,
    *,
    count: int,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
) -> list[int]:
    """Draw `count` times behind the same tokens, as so many choices of one request."""
    one = rows_of([(sampling, prompt, outputs)], vocab_size=len(logits), repeated=count)
    rows = dataclasses.replace(one, choice=np.arange(count, dtype=np.uint64))
    return [int(token) for token in sample(torch.tensor([list(logits)] * count), rows)]


def chi_square(tokens: Sequence[int], expected: Sequence[float]) -> float:
    """Return Pearson's statistic of draws against probabilities; tokens of 0 must not occur."""
    probabilities = np.array(expected) / sum(expected)
    counts = np.bincount(tokens, minlength=len(expected))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    wanted = probabilities[possible] * len(tokens)
    return float(((counts[possible] - wanted) ** 2 / wanted).sum())


CHI_SQUARE_LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
"""Exceeded with p = 0.001, by degrees of freedom."""

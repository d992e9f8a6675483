"""Guesses by a draft model: the same tokens where a seed counts, else the same distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig, SpeculationConfig
from engine.core import EngineCore
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineRequest
from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError
from tests.worker.model_fixtures import load_reference, random_prompts, write_tiny_model
from worker.executors.uniproc import UniprocExecutor
from worker.spec_decode.rejection import rejection_sample

VOCAB_SIZE = 8
PROMPT = [3, 5, 4, 6, 3, 5]
P_VALUE_LIMITS = {7: 24.3, 63: 103.4}
"""What a chi-square statistic exceeds once in a thousand times, by its degrees of freedom."""


def chi_square(counts: NDArray[np.float64], probabilities: NDArray[np.float64]) -> float:
    """Return the statistic of observed counts against exact probabilities."""
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_rejection_sampling_keeps_the_distribution_and_accepts_all_that_can_be(
    sharpness: float,
) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (sharpness * torch.randn(2, VOCAB_SIZE, generator=generator)).double().softmax(dim=-1)
    count = 40_000
    drafts = torch.multinomial(q, count, replacement=True, generator=generator)
    accept_at, draw_at = torch.rand(2, count, dtype=torch.float64, generator=generator)
    tokens = rejection_sample(
        p.expand(count, -1), q.expand(count, -1), drafts, accept_at=accept_at, draw_at=draw_at
    )
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).double().numpy()
    assert chi_square(counts, p.numpy()) < P_VALUE_LIMITS[VOCAB_SIZE - 1]
    best = float(torch.minimum(p, q).sum())
    assert float((tokens == drafts).double().mean()) == pytest.approx(best, abs=0.01)


def test_a_guess_that_the_model_rules_out_is_never_taken() -> None:
    target = torch.tensor([[0.0, 0.25, 0.75]])
    proposal = torch.tensor([[1.0, 0.0, 0.0]])
    for draw_at, token in ((0.0, 1), (0.24, 1), (0.26, 2), (0.999, 2)):
        chosen = rejection_sample(
            target,
            proposal,
            torch.tensor([0]),
            accept_at=torch.tensor([0.0]),
            draw_at=torch.tensor([draw_at]),
        )
        assert chosen.tolist() == [token]


def test_equal_distributions_accept_every_guess() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]]).expand(3, -1)
    drafts = torch.tensor([0, 1, 2])
    almost_one = torch.full((3,), 1 - 2**-40, dtype=torch.float64)
    chosen = rejection_sample(p, p, drafts, accept_at=almost_one, draw_at=almost_one)
    assert chosen.tolist() == [0, 1, 2]


class Models(msgspec.Struct):
    """A model, and another with the same tokens that guesses for it."""

    large: Path
    small: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two random models over eight tokens; the small one has one layer, and other weights."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "large").mkdir()
    (folder / "small").mkdir()
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": 2, "pad_token_id": 2}
    return Models(
        write_tiny_model(folder / "large", initializer_range=0.05, **shape),
        write_tiny_model(folder / "small", initializer_range=0.04, num_hidden_layers=1, **shape),
    )


def decode(
    models: Models, requests: Sequence[EngineRequest], speculation: SpeculationConfig
) -> tuple[dict[str, list[int]], EngineCore]:
    """Run requests to their ends; return their tokens, and the core with its counters."""
    config = EngineConfig(speculation=speculation, check_integrity=True, max_step_s=0.0)
    executor = UniprocExecutor(
        models.large, dtype="float32", engine_config=config, num_threads=1, num_blocks=256
    )
    core = EngineCore(config, executor, VirtualClock())
    tokens: dict[str, list[int]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    executor.close()
    return tokens, core


def drafting(models: Models, *, num_draft_tokens: int = 3) -> SpeculationConfig:
    """Always guess as many tokens as told."""
    return SpeculationConfig(
        method="draft",
        model=str(models.small),
        num_draft_tokens=num_draft_tokens,
        adaptive=False,
    )


def test_greedy_and_seeded_requests_say_what_they_say_without_guesses(models: Models) -> None:
    prompts = random_prompts(8, lengths=[1, 5, 16, 40], vocab_size=VOCAB_SIZE)
    requests = [
        EngineRequest(
            request_id=f"{i}-{temperature}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=temperature, seed=i, top_k=5, max_tokens=30, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]
    plain, _ = decode(models, requests, SpeculationConfig())
    guessed, core = decode(models, requests, drafting(models))
    assert guessed == plain
    acceptance = core.counters.speculation
    assert 0 < acceptance.num_accepted < acceptance.num_tokens


def exact_pairs(folder: Path) -> NDArray[np.float64]:
    """Return the probability of every pair of first two tokens behind PROMPT, flattened."""
    model = load_reference(folder)
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(dim=-1)
        behind = torch.tensor([[*PROMPT, token] for token in range(VOCAB_SIZE)])
        second = model(behind).logits[:, -1].double().softmax(dim=-1)
    pairs: NDArray[np.float64] = (first[:, None] * second).flatten().numpy()
    return pairs


def test_without_a_seed_every_pair_of_tokens_has_its_exact_probability(models: Models) -> None:
    """The second token is verified by rejection, and the third shows that the KV is right."""
    requests = [
        EngineRequest(
            request_id=f"r{seed}",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(
                temperature=1.0, seed=seed, seed_is_free=True, max_tokens=4, ignore_eos=True
            ),
        )
        for seed in range(2500)
    ]
    tokens, core = decode(models, requests, drafting(models, num_draft_tokens=2))
    pairs = Counter((first, second) for first, second, *_ in tokens.values())
    counts = np.array([pairs[i, j] for i in range(VOCAB_SIZE) for j in range(VOCAB_SIZE)], float)
    assert chi_square(counts, exact_pairs(models.large)) < P_VALUE_LIMITS[VOCAB_SIZE**2 - 1]
    plain, _ = decode(models, requests[:200], SpeculationConfig())
    assert {i: tokens[i] for i in plain} != plain
    assert core.counters.speculation.num_accepted > 1000


def test_a_draft_model_with_other_tokens_is_refused(models: Models, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="has 320 tokens, the model 8; use a draft model with"):
        decode(Models(models.large, other), [], drafting(Models(models.large, other)))

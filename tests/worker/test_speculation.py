"""With guesses on a real model, in fp32: tokens, ranks and ends are those of a run without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig, SpeculationConfig
from engine.core import EngineCore
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineOutput, EngineRequest
from engine.spec_decode.acceptance import Acceptance
from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError
from tests.worker.model_fixtures import VOCAB_SIZE, random_prompts, write_tiny_model
from worker.executors.uniproc import UniprocExecutor

NGRAM = SpeculationConfig(
    method="ngram", num_draft_tokens=5, min_ngram=1, max_ngram=3, adaptive=False
)
PROMPTS = [
    prompt * 3 for prompt in random_prompts(6, lengths=[3, 7, 16, 21], vocab_size=VOCAB_SIZE)
]

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    "seeded": SamplingParams(temperature=0.3, max_tokens=40, seed=5, ignore_eos=True),
    "truncated": SamplingParams(
        temperature=0.8, top_k=3, top_p=0.9, min_p=0.01, seed=6, max_tokens=40, ignore_eos=True
    ),
    "penalised": SamplingParams(
        temperature=0.0,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        max_tokens=40,
        logprobs=0,
    ),
    "bad words": SamplingParams(
        temperature=0.0, bad_words=((3, 4), (5,)), min_tokens=12, max_tokens=40
    ),
    "stopped": SamplingParams(temperature=0.0, stop_token_ids=(7, 8, 9, 10, 11), max_tokens=40),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Outcome(msgspec.Struct):
    """What clients got of each prompt, and how well guesses went."""

    outputs: dict[str, list[EngineOutput]]
    acceptance: Acceptance

    def told(self) -> dict[str, tuple[object, ...]]:
        """Return tokens, log probabilities and ends, however they were cut into steps."""
        return {
            request_id: (
                [t for output in outputs for t in output.token_ids],
                [e.token_id for output in outputs for e in output.logprobs],
                [e.rank for output in outputs for e in output.logprobs],
                outputs[-1].finish_reason,
                outputs[-1].stop_token_id,
            )
            for request_id, outputs in self.outputs.items()
        }


def decode(
    folder: Path,
    speculation: SpeculationConfig,
    sampling: Sequence[SamplingParams],
    *,
    async_depth: int = 0,
    num_blocks: int = 256,
) -> Outcome:
    """Run every prompt with each of the given parameters, all in one batch."""
    config = EngineConfig(
        speculation=speculation, async_depth=async_depth, check_integrity=True, max_step_s=0.0
    )
    executor = UniprocExecutor(
        folder, dtype="float32", engine_config=config, num_threads=1, num_blocks=num_blocks
    )
    core = EngineCore(config, executor, VirtualClock())
    for i, prompt in enumerate(PROMPTS):
        for j, each in enumerate(sampling):
            core.add(
                EngineRequest(
                    request_id=f"{i}-{j}",
                    prompt_token_ids=prompt,
                    sampling=each,
                    eos_token_ids=(2,),
                )
            )
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    executor.close()
    return Outcome(outputs, core.counters.speculation)


@pytest.mark.parametrize("kind", SAMPLING)
def test_ngram_guesses_change_nothing_that_a_client_sees(folder: Path, kind: str) -> None:
    plain = decode(folder, SpeculationConfig(), [SAMPLING[kind]])
    guessed = decode(folder, NGRAM, [SAMPLING[kind]])
    assert guessed.told() == plain.told()
    assert guessed.acceptance.num_tokens > 0
    assert plain.acceptance == Acceptance()


@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_a_mixed_batch_under_pressure_and_ahead_of_time(folder: Path, async_depth: int) -> None:
    """Eighty-eight blocks hold about a third of what thirty-six requests want."""
    sampling = list(SAMPLING.values())
    plain = decode(folder, SpeculationConfig(), sampling)
    guessed = decode(folder, NGRAM, sampling, async_depth=async_depth, num_blocks=88)
    assert guessed.told() == plain.told()
    assert guessed.acceptance.num_accepted > 0


def test_guesses_that_pay_are_made_and_change_nothing(folder: Path) -> None:
    adaptive = msgspec.structs.replace(NGRAM, adaptive=True)
    plain = decode(folder, SpeculationConfig(), [SAMPLING["greedy"]])
    assert decode(folder, adaptive, [SAMPLING["greedy"]]).told() == plain.told()


@pytest.mark.parametrize("method", ["medusa", "eagle"])
@pytest.mark.parametrize("async_depth", [0, 2])
def test_random_heads_change_nothing_under_pressure(
    folder: Path, method: str, async_depth: int
) -> None:
    """Their guesses are mostly wrong; a vocabulary of few tokens lets some of them be right."""
    sampling = [SAMPLING["greedy"], SAMPLING["truncated"], SAMPLING["penalised"]]
    heads = msgspec.convert(
        {"method": method, "num_draft_tokens": 3, "adaptive": False}, SpeculationConfig
    )
    plain = decode(folder, SpeculationConfig(), sampling)
    guessed = decode(folder, heads, sampling, async_depth=async_depth, num_blocks=60)
    assert guessed.told() == plain.told()
    assert guessed.acceptance.num_tokens > 100


def test_heads_are_refused_for_a_model_that_shows_no_hidden_states(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family="mistral", sliding_window=32)
    with pytest.raises(ConfigError, match="medusa reads hidden states, which this model does not"):
        decode(folder, SpeculationConfig(method="medusa"), [])

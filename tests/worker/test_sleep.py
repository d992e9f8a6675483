"""A real model sleeps, wakes and changes its weights, in this process and in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.messages import SleepLevel
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    write_tiny_model,
)
from worker.core.spec import CoreSpec
from worker.executors.build import build_executor

PLACES = [False, pytest.param(True, marks=pytest.mark.slow)]
PROMPTS = random_prompts(2, lengths=[40, 33], vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a model, the same with other weights, and one of another shape."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "old")
    write_tiny_model(root / "new")
    torch.manual_seed(9)
    weights = load_file(root / "new" / "model.safetensors")
    changed = {name: w + 0.1 * torch.randn_like(w) for name, w in weights.items()}
    save_file(changed, root / "new" / "model.safetensors", metadata={"format": "pt"})
    write_tiny_model(root / "wide", vocab_size=VOCAB_SIZE + 8)
    return {path.name: path for path in root.iterdir()}


@contextmanager
def executor(folder: Path, *, runner_process: bool = False) -> Iterator[Executor]:
    """Build what a core process would."""
    built = build_executor(
        CoreSpec(
            replica_id="sleeper",
            engine=EngineConfig(),
            model_folder=str(folder),
            dtype="float32",
            num_threads=1,
            num_blocks=64,
            runner_process=runner_process,
        )
    )
    try:
        yield built
    finally:
        built.close()


def expected(folder: Path) -> list[list[int]]:
    model = load_reference(folder)
    return [reference_greedy(model, prompt, 6) for prompt in PROMPTS]


def slept(level: SleepLevel) -> Callable[[EngineCore], None]:
    """Return what puts a core to sleep and wakes it, once, between two steps."""
    done: list[bool] = []

    def before_step(core: EngineCore) -> None:
        if core.stats().step == 3 and not done:
            done.append(True)
            core.sleep(level)
            core.wake_up()

    return before_step


@pytest.mark.fault("engine-29")
@pytest.mark.parametrize("runner_process", PLACES)
def test_tokens_are_the_same_after_a_sleep_and_nothing_was_cached(
    folders: dict[str, Path], runner_process: bool
) -> None:
    with executor(folders["old"], runner_process=runner_process) as built:
        run = EngineRun(built, EngineConfig())
        reference = expected(folders["old"])
        levels: list[SleepLevel] = [1, 2]
        for level in levels:
            assert run.generate(PROMPTS, greedy(6)) == reference
            run.core.sleep(level)
            run.core.wake_up()
            assert run.generate(PROMPTS, greedy(6)) == reference
            assert run.num_cached == [0, 0]


@pytest.mark.parametrize("level", [1, 2])
def test_requests_in_the_middle_of_their_answers_go_on_after_a_sleep(
    folders: dict[str, Path], level: SleepLevel
) -> None:
    with executor(folders["old"]) as built:
        run = EngineRun(built, EngineConfig(), before_step=slept(level))
        assert run.generate(PROMPTS, greedy(6)) == expected(folders["old"])


@pytest.mark.fault("engine-29")
@pytest.mark.parametrize("runner_process", PLACES)
def test_new_weights_give_the_new_models_tokens_and_another_digest(
    folders: dict[str, Path], runner_process: bool
) -> None:
    with executor(folders["old"], runner_process=runner_process) as built:
        run = EngineRun(built, EngineConfig())
        old_digest = built.info.execution_digest
        assert run.generate(PROMPTS, greedy(6)) == expected(folders["old"])
        assert run.core.update_weights(str(folders["new"])) == ([], None)
        assert run.generate(PROMPTS, greedy(6)) == expected(folders["new"])
        assert run.num_cached == [0, 0]
        assert built.info.execution_digest != old_digest
        run.core.sleep(2)
        run.core.wake_up()
        assert run.generate(PROMPTS, greedy(6)) == expected(folders["new"])


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with executor(folders["old"]) as built:
        run = EngineRun(built, EngineConfig())
        _, problem = run.core.update_weights(str(folders["wide"]))
        assert problem == "the new weights have vocab_size=328, this engine vocab_size=320"
        _, problem = run.core.update_weights(str(tmp_path / "none"))
        assert problem is not None
        assert "config.json is missing" in problem
        assert run.generate(PROMPTS, greedy(6)) == expected(folders["old"])

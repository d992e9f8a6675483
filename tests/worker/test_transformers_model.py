"""Models without a file of their own run through transformers, or are refused with a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as typed_transformers

from engine.config import EngineConfig
from kvindex.foundation.errors import ConfigError
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    WINDOW,
    EngineRun,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    write_byte_tokenizer,
)
from worker.model.config import read_model_config
from worker.model.folder import check_model_folder
from worker.model.load import load_model
from worker.model.shard import check_parallel_size

transformers: Any = typed_transformers
"""Its configs take what their types do not name."""

NUM_TOKENS = 12
_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    **_SPECIAL_TOKENS,
}
GPT2 = transformers.GPT2Config(
    vocab_size=VOCAB_SIZE,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=512,
    initializer_range=0.2,
    **_SPECIAL_TOKENS,
)


def write(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def load(folder: Path) -> None:
    load_model(folder, read_model_config(folder), dtype=torch.float32, num_positions=512)


@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        transformers.Olmo2Config(num_key_value_heads=2, **_SHAPE),
        transformers.Phi3Config(num_key_value_heads=2, sliding_window=WINDOW, **_SHAPE),
        transformers.Exaone4Config(
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=WINDOW,
            sliding_window_pattern=2,
            **_SHAPE,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_greedy_tokens_equal_transformers_with_chunks_and_prefix_hits(
    tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, config)
    prompts = random_prompts(3, lengths=[90, 33, 130], vocab_size=VOCAB_SIZE)
    prompts.append([*prompts[0][:70], *prompts[1]])
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    architecture = check_model_folder(folder).architecture
    with caplog.at_level(logging.WARNING):
        executor = executor_for(folder, num_blocks=128)
    assert f"{architecture} runs through transformers: no fast path here" in caplog.messages
    run = EngineRun(executor, EngineConfig(max_num_batched_tokens=40, check_integrity=True))
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.num_cached == [80, 32, 128, 96]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.BloomConfig(
                vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4, **_SPECIAL_TOKENS
            ),
            "max_position_embeddings or n_positions or max_seq_len is missing",
        ),
        (
            transformers.MambaConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=512,
                vocab_size=VOCAB_SIZE,
            ),
            "0 layers use the attention interface",
        ),
        (
            transformers.Gemma2Config(num_key_value_heads=2, head_dim=16, **_SHAPE),
            "its attention asks for softcap",
        ),
        (
            transformers.GPTNeoXConfig(num_key_value_heads=2, **_SHAPE),
            r"layer 0 has keys \(4, 16\) .* its config says \(2, 16\)",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_does_not_work_with_paged_attention_is_refused_at_its_start(
    tmp_path: Path, config: Any, reason: str
) -> None:
    folder = write(tmp_path, config)
    with pytest.raises(ConfigError, match=reason):
        load(folder)


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, GPT2)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"gpt2"', '"no-such-model"'))
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load(folder)


def test_it_runs_on_one_rank_only(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, GPT2))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is computed by transformers"):
        check_parallel_size(config, 2)

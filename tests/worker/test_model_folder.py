"""A model folder that cannot be served gives one line that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvindex.foundation.errors import ConfigError, DependencyError
from tests.worker.model_fixtures import executor_for, rewrite_weights, write_tiny_model
from worker.model.config import read_model_config
from worker.model.folder import ModelFolder, check_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_good_folder_says_what_it_holds(folder: Path) -> None:
    assert check_model_folder(folder) == ModelFolder(
        folder=str(folder),
        model="tiny",
        architecture="LlamaForCausalLM",
        max_model_len=512,
        vocab_size=320,
        eos_token_ids=(2,),
    )


def test_a_missing_folder_names_what_may_be_given_instead(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"nowhere does not exist; use 'demo' or .* Llama"):
        check_model_folder(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(DependencyError, match=r"model.gguf is a file, not a folder"):
        check_model_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DependencyError, match="safetensors" if "model" in name else name):
        check_model_folder(folder)


def test_a_truncated_weight_file_is_found_without_reading_it(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DependencyError, match="is truncated"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_weight_file_that_is_none_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DependencyError, match=r"model.safetensors is no safetensors file"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["BertForMaskedLM"]},
            r"unsupported architecture \(BertForMaskedLM\); supported are LlamaForCausalLM,",
        ),
        ({"architectures": []}, "none named"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"vocab_size": None}, "vocab_size is None, expected a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope scaling 'yarn' is not supported, only default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope scaling 'dynamic'"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is no multiple"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types=.* is not supported",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "softcapping="),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers="),
    ],
)
def test_a_model_that_is_not_supported_names_the_field(
    folder: Path, fields: dict[str, object], message: str
) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, **fields)
    with pytest.raises(ConfigError, match=message):
        check_model_folder(folder)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json: (not readable as JSON|expected a JSON)"):
        check_model_folder(folder)


def test_end_tokens_of_the_generation_config_win(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_model_config(folder).eos_token_ids == (5, 6)


def test_older_spellings_of_rotary_settings_are_read(folder: Path) -> None:
    change_config(folder, rope_theta=5e5, rope_parameters=None)
    assert read_model_config(folder).rope.theta == 5e5
    change_config(folder, rope_scaling={"type": "linear", "factor": 2.0})
    assert read_model_config(folder).rope.factor == 2.0


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"tensor model\.norm\.weight is missing"),
        ("model.norm.weight", torch.ones(3), r"has shape \(3,\), config\.json asks for \(72,\)"),
        ("model.extra.bias", torch.ones(3), r"model\.extra\.bias has no place in LlamaForCausalLM"),
    ],
)
def test_weights_that_do_not_match_the_config_are_refused(
    folder: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    rewrite_weights(folder, name, tensor)
    with pytest.raises(DependencyError, match=message):
        executor_for(folder)


def test_weights_in_several_files_are_loaded(folder: Path) -> None:
    whole = executor_for(folder).info
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert executor_for(folder).info.max_model_len == whole.max_model_len
    (folder / "b.safetensors").unlink()
    with pytest.raises(DependencyError, match=r"names b\.safetensors, which is missing"):
        check_model_folder(folder)


def test_an_unknown_precision_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float8' is not supported, only auto, float32"):
        executor_for(folder, dtype="float8")

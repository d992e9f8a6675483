"""Preparing a model: conversion from GGUF, its cache, and the command's answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from kvindex.foundation.errors import ConfigError, DependencyError
from tests.worker.model_fixtures import load_reference, write_tiny_model
from worker.model.demo import cached_conversion
from worker.model.gguf_convert import convert_gguf, to_bfloat16

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["Ġa", "12", "ab"]
MERGES = ["Ġ a", "1 2", "a b"]
TOKENS = [*SPECIAL, *BYTES, *MERGED]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16


def ignore_progress(done: float) -> None:
    """A caller that shows none."""


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order q and k rows as llama.cpp's converter does."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    file: Path, original: Path, *, architecture: str = "llama", pre: str = "smollm"
) -> Path:
    """Write a tiny model of `original`'s weights as a GGUF file in float32."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(72)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, weight in load_reference(original).state_dict().items():
        array = weight.numpy()
        if "q_proj" in name:
            array = llama_cpp_rows(array, NUM_HEADS)
        if "k_proj" in name:
            array = llama_cpp_rows(array, NUM_KV_HEADS)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = names.get_name(name, try_suffixes=(".weight",))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return write_tiny_model(folder, vocab_size=len(TOKENS), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def source(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(source, folder, progress=ignore_progress)
    return folder


def test_converted_weights_are_the_originals_in_bfloat16(original: Path, converted: Path) -> None:
    expected = load_reference(original, torch.bfloat16).state_dict()
    actual = load_reference(converted, torch.bfloat16).state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_converted_tokenizer_splits_digits_and_keeps_special_tokens(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("ab a 12<|im_end|>").tokens == [
        "ab",
        "Ġa",
        "Ġ",
        "1",
        "2",
        "<|im_end|>",
    ]
    text = "naïve 漢字\t🤖 x² <|im_start|>user\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    values[:4] = (1.00390625, 1.01171875, 0.0, -0.0)  # two ties, two zeros
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bfloat16(values) == expected).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "gemma"}, "GGUF architecture 'gemma' is not supported"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2' is not supported"),
    ],
)
def test_a_gguf_of_another_kind_is_refused(
    original: Path, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    file = tmp_path / "other.gguf"
    if "architecture" in settings:
        writer = gguf.GGUFWriter(file, settings["architecture"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        write_gguf(file, original, **settings)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(file, tmp_path, progress=ignore_progress)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(DependencyError, match=r"x\.gguf: not readable as GGUF"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, progress=ignore_progress)


def test_a_conversion_is_done_once_and_again_when_damaged(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "tiny"
    shares: list[float] = []
    folder = cached_conversion(source, target, progress=shares.append)
    assert shares[-1] == 1.0
    shares.clear()
    assert cached_conversion(source, target, progress=shares.append) == folder
    assert shares == []
    (target / "model.safetensors").write_bytes(b"")
    assert cached_conversion(source, target, progress=shares.append) == folder
    assert shares[-1] == 1.0


def test_several_at_once_convert_a_model_once(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    counted: list[float] = []
    threads = [
        threading.Thread(
            target=cached_conversion, args=(source, target), kwargs={"progress": counted.append}
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.count(1.0) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny", "tiny.lock"]


def _killed_half_way(source: Path, target: Path) -> None:
    def die(done: float) -> None:
        if done > 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    cached_conversion(source, target, progress=die)


def test_a_conversion_killed_half_way_leaves_nothing_in_the_way(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "tiny"
    process = multiprocessing.get_context("fork").Process(
        target=_killed_half_way, args=(source, target)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert cached_conversion(source, target, progress=ignore_progress).folder == str(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny", "tiny.lock"]


def test_a_cache_that_cannot_be_written_is_one_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DependencyError, match=r"cannot be written to .* set another cache"):
        cached_conversion(source, tmp_path / "file" / "tiny", progress=ignore_progress)


def prepare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "worker.model.prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_passes_a_local_folder_through(original: Path) -> None:
    result = prepare("--model", str(original), "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout) == {
        "folder": str(original),
        "model": original.name,
        "architecture": "LlamaForCausalLM",
        "max_model_len": 512,
        "vocab_size": len(TOKENS),
        "eos_token_ids": [2],
    }


def test_the_command_ends_with_one_line_about_a_missing_model(tmp_path: Path) -> None:
    result = prepare("--model", str(tmp_path / "nowhere"))
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: model {tmp_path}/nowhere does not exist; use 'demo'")
    assert result.stderr.count("\n") == 1


def test_the_command_tells_an_unsupported_model_from_a_missing_one(
    original: Path, tmp_path: Path
) -> None:
    config = json.loads((original / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    result = prepare("--model", str(tmp_path))
    assert result.returncode == 2
    assert "unsupported architecture (BertModel); supported are Llama" in result.stderr


def test_preparing_a_folder_does_not_import_torch(original: Path) -> None:
    program = (
        "import sys; from worker.model.prepare import main; "
        f"assert main(['--model', {str(original)!r}]) == 0; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

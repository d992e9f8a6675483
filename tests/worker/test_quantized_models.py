"""Checkpoints in eight bits give what the numbers give that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from kvindex.foundation.errors import ConfigError, DependencyError
from tests.worker.cpu.test_compiled_forward import (
    PROMPT,
    empty_cache,
    load,
    logits_of,
)
from tests.worker.model_fixtures import (
    FAMILIES,
    VOCAB_SIZE,
    WIDE,
    EngineRun,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    rewrite_weights,
    store_in_bfloat16,
    write_tiny_model,
)
from tests.worker.quantized_fixtures import KEPT_KINDS, KINDS, compressed_tensors, quantize
from tests.worker.test_model_families import ON_ONE_RANK, logits_of_ranks, our_logits
from worker.model.config import read_model_config
from worker.model.decoder import FeedForward
from worker.model.eight_bit_layers import eight_bit_layers
from worker.model.folder import check_model_folder
from worker.model.load_decoder import load_weights
from worker.model.quantized_source import QuantizedSource, open_weights
from worker.model.shard import shard_of

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
INTEGERS = ("int8 rows", "int8 rows, packed", "int8 groups, packed", "bitsandbytes")
NUM_TOKENS = 12


def tensors_of(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what a loaded model computes with."""
    config = read_model_config(folder)
    weights = load_weights(folder, config, shard_of(config, rank=0, size=1), dtype=dtype)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        assert isinstance(layer.mlp, FeedForward)
        tensors += [layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down, layer.mlp_norm]
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_KIND
def test_weights_are_bit_for_bit_the_numbers_that_the_checkpoint_stands_for(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder = write_tiny_model(tmp_path / "plain")
    found, meant = (tensors_of(each, dtype) for each in quantize(folder, kind, into=tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))


@EVERY_KIND
def test_logits_are_near_those_of_the_model_that_was_quantized(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "plain")
    quantized, meaning = quantize(folder, kind, into=tmp_path)
    with torch.inference_mode():
        plain, meant, found = (
            our_logits(each, PROMPT, [1, 40, 109]) for each in (folder, meaning, quantized)
        )
    # Where a tensor lies in memory decides how torch sums.
    assert (found - meant).abs().max() <= 1e-5
    likeness = torch.cosine_similarity(found, plain).mean()
    assert likeness >= (0.999 if kind in INTEGERS else 0.98)


@pytest.mark.parametrize(
    "name", ["qwen2 half windowed", "qwen3 moe", "gemma3", "granite with mamba"]
)
def test_every_family_reads_them_whole_and_in_ranks(tmp_path: Path, name: str) -> None:
    family, overrides = FAMILIES[name]
    folder = write_tiny_model(tmp_path / "plain", family=family, **overrides)
    quantized, meaning = quantize(folder, "float8 blocks", into=tmp_path)
    with torch.inference_mode():
        meant, found = (our_logits(each, PROMPT, [150]) for each in (meaning, quantized))
    assert (found - meant).abs().max() <= 1e-5
    for of_rank in [] if name in ON_ONE_RANK else logits_of_ranks(quantized, PROMPT, 2):
        assert (of_rank - meant).abs().max() <= 1e-3


@EVERY_KIND
def test_compiled_steps_differ_by_the_rounding_of_sums_alone(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "plain", **WIDE)
    quantized, meaning = quantize(folder, kind, into=tmp_path)
    plain = load(meaning, torch.float32, compiled=False)
    compiled = load(quantized, torch.float32, compiled=True)
    meant = logits_of(plain, empty_cache(plain), [150])
    for chunk_sizes in ([150], [1, 2, 3, 5, 13, 64, 62]):
        found = logits_of(compiled, empty_cache(compiled), chunk_sizes)
        assert (found - meant).abs().max() <= 1e-4


@EVERY_KIND
def test_weights_with_a_scale_per_row_stay_in_eight_bits_for_compiled_steps(
    tmp_path: Path, kind: str
) -> None:
    quantized, _ = quantize(write_tiny_model(tmp_path / "plain"), kind, into=tmp_path)
    config = read_model_config(quantized)
    source = open_weights(quantized, config)
    assert isinstance(source, QuantizedSource)
    assert (eight_bit_layers(source, config) is not None) == (kind in KEPT_KINDS)


@pytest.mark.parametrize("kind", ["int8 rows", "float8 rows"])
def test_however_a_prompt_is_cut_compiled_steps_give_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    folder = write_tiny_model(tmp_path / "plain", **WIDE)
    model = load(quantize(folder, kind, into=tmp_path)[0], torch.float32, compiled=True)
    whole = logits_of(model, empty_cache(model), [150])
    for chunk_sizes in ([1] * 150, [7] * 21 + [3], [64, 1, 85]):
        assert torch.equal(logits_of(model, empty_cache(model), chunk_sizes), whole)


@pytest.mark.parametrize("kind", ["int8 rows, packed", "float8 rows"])
def test_steps_that_cannot_be_compiled_read_the_same_eight_bits(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "plain", family="qwen2", **WIDE)
    store_in_bfloat16(folder)
    model = load(quantize(folder, kind, into=tmp_path)[0], torch.float32, compiled=True)
    compiled = logits_of(model, empty_cache(model), [1, 20, 129])
    model.tap = lambda hidden: None
    plain = logits_of(model, empty_cache(model), [1, 20, 129])
    assert (plain - compiled).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["int8 rows", "float8 blocks"])
def test_greedy_tokens_equal_transformers_on_those_numbers_with_prefix_hits(
    tmp_path: Path, kind: str
) -> None:
    folder = write_tiny_model(tmp_path / "plain", **WIDE)
    quantized, meaning = quantize(folder, kind, into=tmp_path)
    prompts = random_prompts(3, lengths=[90, 33, 130], vocab_size=VOCAB_SIZE)
    model = load_reference(meaning)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    run = EngineRun(
        executor_for(quantized, num_blocks=128), EngineConfig(max_num_batched_tokens=40)
    )
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.num_cached == [80, 32, 128]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"quantization_config is \[\], expected an object"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"quant_method 'gptq' is not supported, only compressed-tensors, fp8, fbgemm_fp8, "
            r"bitsandbytes in eight bits; serve a checkpoint of those",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_4bit=True is not"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit is None, expected true"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported, only 'e4m3'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size is \[128\], expected two positive integers",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups is None, expected an object"),
        (compressed_tensors("int-quantized", num_bits=4), "num_bits=4 is not supported, only 8"),
        (compressed_tensors("int-quantized", symmetric=False), "symmetric=False is not supported"),
        (compressed_tensors("nvfp4-pack-quantized"), "format='nvfp4-pack-quantized' is not"),
        (compressed_tensors("pack-quantized", strategy="tensor_group"), "strategy='tensor_group'"),
        (compressed_tensors("pack-quantized", actorder="group"), "actorder='group' is not"),
        (
            compressed_tensors("pack-quantized", strategy="group", group_size=-1),
            "group_size is -1, expected a positive integer",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, settings: object, message: str
) -> None:
    folder = write_tiny_model(tmp_path)
    change_quantization(folder, settings)
    with pytest.raises(ConfigError, match=message):
        check_model_folder(folder)


def test_a_model_that_transformers_computes_must_not_be_quantized(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    change_quantization(folder, KINDS["fbgemm"][1], architectures=["OlmoForCausalLM"])
    with pytest.raises(ConfigError, match=r"OlmoForCausalLM runs through transformers, where"):
        check_model_folder(folder)


PROJECTION = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "part", "tensor", "message"),
    [
        (
            "int8 rows",
            "weight_scale",
            None,
            rf"{PROJECTION}\.weight is stored in eight bits, and its scales are missing: "
            rf"{PROJECTION}\.weight_scale",
        ),
        (
            "int8 rows",
            "weight_scale",
            torch.ones(7, 1),
            rf"{PROJECTION}\.weight_scale has shape \(7, 1\), which fits neither the rows of",
        ),
        ("int8 rows, packed", "weight_shape", torch.tensor([72, 127]), r"weight_packed is torch"),
        ("float8 rows", "weight", torch.full((72, 128), torch.nan).to(torch.float8_e4m3fn), "none"),
        ("float8 rows", "weight_zero_point", torch.zeros(72, 1), "weight_zero_point has no place"),
    ],
)
def test_damaged_weights_are_named(
    tmp_path: Path, kind: str, part: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder, _ = quantize(write_tiny_model(tmp_path / "plain"), kind, into=tmp_path)
    rewrite_weights(folder, f"{PROJECTION}.{part}", tensor)
    with pytest.raises(DependencyError, match=message):
        executor_for(folder)


def test_integers_that_no_config_explains_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    values = torch.ones(72, 128, dtype=torch.int8)
    rewrite_weights(folder, f"{PROJECTION}.weight", values)
    with pytest.raises(DependencyError, match=r"is stored in I8, and config\.json does not say"):
        executor_for(folder)


def change_quantization(folder: Path, settings: object, **fields: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields | {"quantization_config": settings}
    file.write_text(json.dumps(config))

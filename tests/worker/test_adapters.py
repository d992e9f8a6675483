"""A request with an adapter gets what the model with the merged weights would give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import EngineOutput, EngineRequest, LoRARequest
from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from tests.worker.adapter_fixtures import merge_adapter, tensor_stem, write_adapter
from tests.worker.model_fixtures import (
    FAMILIES,
    VOCAB_SIZE,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    write_tiny_model,
)
from tests.worker.test_model_llama import our_logits
from worker.model.adapter_folder import check_adapter_folder
from worker.model.config import read_model_config
from worker.model.lora import AdapterRows, BatchAdapters, load_adapter

PROMPTS = random_prompts(4, lengths=[40, 25, 33, 7], vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a model, two adapters and the model with each of them merged."""
    root = tmp_path_factory.mktemp("adapters")
    model = write_tiny_model(root / "model")
    one = write_adapter(root / "one", model, seed=1)
    two = write_adapter(
        root / "two",
        model,
        seed=2,
        rank=9,
        targets=("q_proj", "v_proj", "up_proj"),
        layers=[1],
        use_rslora=True,
    )
    merge_adapter(model, one, root / "one-merged", scale=2.0)
    merge_adapter(model, two, root / "two-merged", scale=8.0 / 3.0)
    return {path.name: path for path in root.iterdir()}


def lora(folder: Path, name: str = "") -> LoRARequest:
    """Name an adapter like its folder."""
    return LoRARequest(name or folder.name, str(folder), check_adapter_folder(folder, None).digest)


def generate(
    core: EngineCore, asked: Sequence[tuple[list[int], LoRARequest | None]]
) -> list[EngineOutput]:
    """Run all at once to their ends; return one output for each, with all its tokens."""
    for i, (prompt, adapter) in enumerate(asked):
        core.add(
            EngineRequest(
                request_id=f"{i}", prompt_token_ids=prompt, sampling=greedy(8), lora=adapter
            )
        )
    outputs = [EngineOutput(request_id=f"{i}") for i in range(len(asked))]
    while core.has_work:
        for output in core.step():
            whole = outputs[int(output.request_id)]
            outputs[int(output.request_id)] = EngineOutput(
                request_id=output.request_id,
                token_ids=whole.token_ids + output.token_ids,
                error=whole.error or output.error,
            )
    return outputs


def core_for(model: Path, *, async_depth: int = 0, caching: bool = True) -> EngineCore:
    """Make a core over a model, in float32."""
    config = EngineConfig(enable_prefix_caching=caching, async_depth=async_depth)
    return EngineCore(config, executor_for(model, async_depth=async_depth), VirtualClock())


@pytest.mark.parametrize("name", ["one", "two"])
def test_logits_equal_those_of_the_merged_weights(folders: dict[str, Path], name: str) -> None:
    config = read_model_config(folders["model"])
    folder = check_adapter_folder(folders[name], config)
    adapter = load_adapter(folder, config, dtype=torch.float32)
    (prompt,) = random_prompts(1, lengths=[120], vocab_size=VOCAB_SIZE)
    batch = BatchAdapters([AdapterRows(adapter, None)])
    with torch.inference_mode():
        expected = load_reference(folders[f"{name}-merged"])(torch.tensor([prompt])).logits[0]
        logits = our_logits(folders["model"], prompt, [120], adapters=batch)
        plain = our_logits(folders["model"], prompt, [120])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.5


@pytest.mark.parametrize("async_depth", [0, 1])
def test_adapters_mixed_in_one_batch_give_the_tokens_of_each_merged_model(
    folders: dict[str, Path], async_depth: int
) -> None:
    one, two = lora(folders["one"]), lora(folders["two"])
    core = core_for(folders["model"], async_depth=async_depth)
    outputs = generate(core, list(zip(PROMPTS, [one, None, two, one], strict=True)))
    merged = ["one-merged", "model", "two-merged", "one-merged"]
    for prompt, output, name in zip(PROMPTS, outputs, merged, strict=True):
        assert output.token_ids == reference_greedy(load_reference(folders[name]), prompt, 8), name


def test_rows_without_an_adapter_are_bit_for_bit_what_they_were(folders: dict[str, Path]) -> None:
    config = read_model_config(folders["model"])
    adapter = load_adapter(
        check_adapter_folder(folders["one"], config), config, dtype=torch.float32
    )
    (prompt,) = random_prompts(1, lengths=[50], vocab_size=VOCAB_SIZE)
    # The last ten tokens have the adapter: what comes before attends to none of them.
    batch = BatchAdapters([AdapterRows(adapter, torch.arange(40, 50))])
    with torch.inference_mode():
        mixed = our_logits(folders["model"], prompt, [50], adapters=batch, compiled=False)
        plain = our_logits(folders["model"], prompt, [50], compiled=False)
    assert torch.equal(mixed[:40], plain[:40])
    assert not torch.equal(mixed[40:], plain[40:])


def test_one_prompt_under_two_adapters_and_none_shares_no_cache(folders: dict[str, Path]) -> None:
    one, two = lora(folders["one"]), lora(folders["two"])
    core = core_for(folders["model"])
    for adapter, name in [(None, "model"), (one, "one-merged"), (two, "two-merged")]:
        (output,) = generate(core, [(PROMPTS[0], adapter)])
        expected = reference_greedy(load_reference(folders[name]), PROMPTS[0], 8)
        assert output.token_ids == expected, name


def test_a_changed_folder_ends_its_request_alone_and_leaves_nothing_cached(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "moving", folders["model"], seed=3)
    before = lora(folder)
    write_adapter(folder, folders["model"], seed=4)
    core = core_for(folders["model"])
    failed, good = generate(core, [(PROMPTS[0], before), (PROMPTS[1], None)])
    assert failed.error is not None
    assert "has changed since it was loaded" in failed.error
    assert good.error is None
    num_of_good = (len(PROMPTS[1]) + 8 - 1) // 16
    assert core.kv_cache.pool.num_cached_hashes == num_of_good


def test_bfloat16_adapters_run_on_a_float32_model(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "half", folders["model"], seed=5, dtype=torch.bfloat16)
    merged = merge_adapter(folders["model"], folder, tmp_path / "merged", scale=2.0)
    (output,) = generate(core_for(folders["model"]), [(PROMPTS[2], lora(folder))])
    assert output.token_ids == reference_greedy(load_reference(merged), PROMPTS[2], 8)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8} is not supported"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', only 'LORA' is served"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"r": 5}, "has shape (4, 128), this model and r=5 ask for (5, 128)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    folder = write_adapter(tmp_path / "odd", folders["model"], seed=1, **fields)
    with pytest.raises(ConfigError) as refusal:
        check_adapter_folder(folder, read_model_config(folders["model"]))
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    ("stem", "problem"),
    [
        (
            "base_model.model.lm_head",
            "tensor base_model.model.lm_head.lora_A.weight is no low-rank",
        ),
        (tensor_stem(0, "gate_proj"), "gate_proj of layer 0 has only lora_A"),
        (tensor_stem(7, "q_proj"), "q_proj of layer 7 has only lora_A"),
    ],
)
def test_a_tensor_without_a_place_or_a_counterpart_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, stem: str, problem: str
) -> None:
    from safetensors.torch import save_file

    folder = write_adapter(tmp_path / "odd", folders["model"], seed=1)
    save_file({f"{stem}.lora_A.weight": torch.zeros(4, 72)}, folder / "adapter_model.safetensors")
    with pytest.raises(PrefixFleetError) as refusal:
        check_adapter_folder(folder, read_model_config(folders["model"]))
    assert problem in str(refusal.value)


def test_an_adapter_of_a_deeper_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "deep", folders["model"], seed=1, layers=[5])
    with pytest.raises(ConfigError, match="the adapter has a layer 5, the model has 2"):
        check_adapter_folder(folder, read_model_config(folders["model"]))


def test_a_folder_without_weights_is_no_adapter(folders: dict[str, Path]) -> None:
    with pytest.raises(DependencyError, match=r"adapter_config\.json is missing"):
        check_adapter_folder(folders["model"], None)


@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma3"))],
)
def test_the_other_native_families_take_adapters_too(tmp_path: Path, family: str) -> None:
    base, overrides = FAMILIES.get(family, (family, {}))
    model = write_tiny_model(tmp_path / "model", family=base, **overrides)
    adapter = write_adapter(tmp_path / "adapter", model, seed=6)
    merged = merge_adapter(model, adapter, tmp_path / "merged", scale=2.0)
    one = lora(adapter)
    outputs = generate(core_for(model), [(PROMPTS[0], one), (PROMPTS[1], None)])
    for output, folder, prompt in zip(outputs, (merged, model), PROMPTS, strict=False):
        assert output.token_ids == reference_greedy(load_reference(folder), prompt, 8)


def test_experts_take_adapters_of_their_attention_alone(tmp_path: Path) -> None:
    base, overrides = FAMILIES["qwen3 moe"]
    model = write_tiny_model(tmp_path / "model", family=base, **overrides)
    config = read_model_config(model)
    with pytest.raises(ConfigError, match="adapters of experts are not served"):
        check_adapter_folder(write_adapter(tmp_path / "all", model, seed=1), config)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    folder = write_adapter(tmp_path / "attention", model, seed=1, targets=attention)
    merged = merge_adapter(model, folder, tmp_path / "merged", scale=2.0)
    (output,) = generate(core_for(model), [(PROMPTS[0], lora(folder))])
    assert output.token_ids == reference_greedy(load_reference(merged), PROMPTS[0], 8)


def test_a_hybrid_takes_adapters_where_it_has_attention(tmp_path: Path) -> None:
    base, overrides = FAMILIES["granite with mamba"]
    model = write_tiny_model(tmp_path / "model", family=base, **overrides)
    config = read_model_config(model)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    wrong = write_adapter(tmp_path / "all", model, seed=1, targets=attention, layers=[2, 3])
    with pytest.raises(ConfigError, match=r"layer 3 of Granite.* has no attention, .* a k_proj"):
        check_adapter_folder(wrong, config)
    folder = write_adapter(tmp_path / "two", model, seed=1, targets=attention, layers=[2, 5])
    merged = merge_adapter(model, folder, tmp_path / "merged", scale=2.0)
    outputs = generate(core_for(model), [(PROMPTS[0], lora(folder)), (PROMPTS[1], None)])
    for output, of, prompt in zip(outputs, (merged, model), PROMPTS, strict=False):
        assert output.token_ids == reference_greedy(load_reference(of), prompt, 8)

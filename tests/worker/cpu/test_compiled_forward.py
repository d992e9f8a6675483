"""The compiled step gives what plain torch operations give, and the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvindex.foundation.errors import ConfigError
from tests.worker.logit_fixtures import BLOCK_SIZE, logits_in
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    WIDE,
    random_prompts,
    store_in_bfloat16,
    write_tiny_model,
)
from worker.cpu.attention import AttentionPlan
from worker.cpu.compiled.forward import segments_of
from worker.model.config import read_model_config
from worker.model.llama import KVCache, LlamaModel
from worker.model.load import load_model
from worker.model.load_llama import load_llama

NUM_BLOCKS = 64
(PROMPT,) = random_prompts(1, lengths=[150], vocab_size=VOCAB_SIZE)
TABLE = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS, dtype=np.int32))


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def load(folder: Path, dtype: torch.dtype, *, compiled: bool) -> LlamaModel:
    """Load a model whose every step is the compiled one, even where torch would be faster."""
    config = read_model_config(folder)
    return load_llama(
        folder,
        config,
        dtype=dtype,
        num_positions=512,
        compiled=compiled,
        deterministic=compiled,
    )


def empty_cache(model: LlamaModel) -> KVCache:
    config = model.config
    shape = (config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return KVCache(*(torch.full(shape, torch.nan, dtype=model.dtype) for _ in range(2)))


def logits_of(model: LlamaModel, cache: KVCache, chunk_sizes: list[int]) -> torch.Tensor:
    """Compute all logits of PROMPT, chunk by chunk."""
    return logits_in(model, cache, PROMPT, chunk_sizes, tables=[TABLE[None, :]])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1, "intermediate_size": 224}),
        ("mistral", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ],
)
@pytest.mark.parametrize("is_half", [False, True])
def test_logits_equal_those_of_plain_operations(
    tmp_path: Path, family: str, overrides: dict[str, object], is_half: bool
) -> None:
    folder = write_tiny_model(tmp_path, family=family, **{**WIDE, **overrides})
    if is_half:
        store_in_bfloat16(folder)
    plain, compiled = (load(folder, torch.float32, compiled=c) for c in (False, True))
    expected = logits_of(plain, empty_cache(plain), [150])
    for chunk_sizes in ([150], [1, 2, 3, 5, 13, 64, 62]):
        cache = empty_cache(compiled)
        assert (logits_of(compiled, cache, chunk_sizes) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_steps_read_what_compiled_ones_wrote_and_the_reverse(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, **WIDE)
    store_in_bfloat16(folder)
    model, sizes = load(folder, dtype, compiled=True), [40, 30, 50, 30]
    expected = logits_of(model, empty_cache(model), sizes)
    turns = iter([True, False] * 2)
    monkeypatch.setattr(model, "_suits", lambda *_: next(turns))
    error = logits_of(model, empty_cache(model), sizes) - expected
    assert error.std() < expected.std() * (0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_however_a_prompt_is_cut_its_logits_and_its_kv_are_the_same_bits(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = write_tiny_model(tmp_path, **WIDE)
    model = load(folder, dtype, compiled=True)
    whole_cache = empty_cache(model)
    whole = logits_of(model, whole_cache, [150])
    for chunk_sizes in ([1] * 150, [7] * 21 + [3], [64, 1, 85]):
        cache = empty_cache(model)
        assert torch.equal(logits_of(model, cache, chunk_sizes), whole)
        assert torch.equal(cache.keys.nan_to_num(), whole_cache.keys.nan_to_num())
        assert torch.equal(cache.values.nan_to_num(), whole_cache.values.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_alone_and_beside_others(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny_model(tmp_path, **WIDE)
    model = load(folder, dtype, compiled=True)
    cache = empty_cache(model)
    logits_of(model, cache, [150])
    lengths = np.array([100, 3, 149, 64, 17, 31, 80])
    tokens = torch.tensor([PROMPT[n] for n in lengths])

    def decode(rows: slice) -> torch.Tensor:
        count = len(lengths[rows])
        plan = AttentionPlan(
            np.ones(count, np.int64), lengths[rows], np.tile(TABLE, (count, 1)), BLOCK_SIZE
        )
        positions = torch.from_numpy(lengths[rows])
        # Each row writes the key and value that its position holds already.
        return model.forward(
            tokens[rows], positions, cache=cache, plan=plan, rows=torch.arange(count)
        )

    together = decode(slice(None))
    alone = torch.cat([decode(slice(i, i + 1)) for i in range(len(lengths))])
    assert torch.equal(together, alone)


def test_keys_and_values_in_bfloat16_are_rounded_to_the_nearest_even(tmp_path: Path) -> None:
    # Heads that are no whole panels: what is multiplied stays in float32 on every CPU.
    folder = write_tiny_model(tmp_path, **{**WIDE, "head_dim": 48})
    store_in_bfloat16(folder)
    single, half = (load(folder, d, compiled=True) for d in (torch.float32, torch.bfloat16))
    caches = [empty_cache(model) for model in (single, half)]
    for model, cache in zip((single, half), caches, strict=True):
        logits_of(model, cache, [150])
    for exact, rounded in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
        # The first layer has seen nothing rounded yet.
        assert torch.equal(exact[0].bfloat16().nan_to_num(), rounded[0].nan_to_num())


@pytest.mark.parametrize("overrides", [{}, {"head_dim": 64, "num_key_value_heads": 1}])
def test_bfloat16_is_as_near_to_float32_as_plain_operations_are(
    tmp_path: Path, overrides: dict[str, object]
) -> None:
    folder = write_tiny_model(tmp_path, **{**WIDE, **overrides})
    store_in_bfloat16(folder)
    exact = load(folder, torch.float32, compiled=False)
    expected = logits_of(exact, empty_cache(exact), [150])
    errors = []
    for compiled in (False, True):
        model = load(folder, torch.bfloat16, compiled=compiled)
        found = logits_of(model, empty_cache(model), [150])
        errors.append((found - expected).square().mean().sqrt())
    plain, ours = errors
    assert ours <= plain
    assert ours <= 0.02 * expected.std()


def test_a_prompt_cut_inside_of_a_chunk_reads_nothing_that_was_never_written(
    tmp_path: Path,
) -> None:
    """Behind the last token its block holds no numbers, and the weights there are zero."""
    model = load(write_tiny_model(tmp_path, **WIDE), torch.bfloat16, compiled=True)
    for size in (1, 2, 17, 31, 33, 63, 65):
        assert logits_of(model, empty_cache(model), [size]).isfinite().all()


def test_weights_stay_in_bfloat16_only_if_every_tensor_is(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **WIDE)
    store_in_bfloat16(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-4
    save_file(weights, file, metadata={"format": "pt"})
    plain, compiled = (load(folder, torch.float32, compiled=c) for c in (False, True))
    expected = logits_of(plain, empty_cache(plain), [150])
    difference = logits_of(compiled, empty_cache(compiled), [150]) - expected
    assert difference.abs().max() <= 1e-4


def test_logits_of_no_row_are_none(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, **WIDE), torch.float32, compiled=True)
    plan = AttentionPlan(np.array([4]), np.array([0]), TABLE[None, :], BLOCK_SIZE)
    nothing = torch.zeros(0, dtype=torch.int64)
    logits = model.forward(
        torch.tensor(PROMPT[:4]), torch.arange(4), cache=empty_cache(model), plan=plan, rows=nothing
    )
    assert logits.shape == (0, VOCAB_SIZE)


def test_logits_stay_what_they_are_while_somebody_reads_them(tmp_path: Path) -> None:
    """Steps of few rows write where the last one did, once nobody reads that any more."""
    model = load(write_tiny_model(tmp_path, **WIDE), torch.float32, compiled=True)
    cache = empty_cache(model)
    expected = logits_of(model, cache, [150])

    def decode(position: int) -> torch.Tensor:
        return model.forward(
            torch.tensor(PROMPT[position : position + 1]),
            torch.tensor([position]),
            cache=cache,
            plan=AttentionPlan(np.array([1]), np.array([position]), TABLE[None, :], BLOCK_SIZE),
            rows=torch.tensor([0]),
        )

    kept = [decode(position)[0] for position in (40, 50, 60)]
    assert torch.equal(torch.stack(kept), expected[[40, 50, 60]])
    place = decode(70).data_ptr()
    assert decode(80).data_ptr() == place


def test_what_cannot_be_deterministic_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **WIDE)
    config = msgspec.structs.replace(
        read_model_config(folder), architecture="Qwen3ForCausalLM", qk_norm=True
    )
    with pytest.raises(ConfigError, match=r"worker\.deterministic needs numba and a Llama"):
        load_model(folder, config, dtype=torch.float32, num_positions=512, deterministic=True)


def test_segments_are_runs_of_one_request() -> None:
    assert segments_of(np.array([1, 20, 8, 3]), 8).tolist() == [
        [0, 1], [1, 8], [9, 8], [17, 4], [21, 8], [29, 3],
    ]  # fmt: skip

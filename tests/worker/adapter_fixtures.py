"""Random LoRA adapters in PEFT's layout, and the model with one merged into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from worker.model.adapter_folder import TARGETS, target_shapes
from worker.model.config import read_model_config

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: object,
) -> Path:
    """Write an adapter that changes the model's answers visibly; return its folder."""
    config = read_model_config(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for target in targets:
            out_size, in_size = target_shapes(config)[target]
            a = torch.randn(rank, in_size, generator=generator) * 0.2
            b = torch.randn(out_size, rank, generator=generator) * 0.2
            tensors[f"{tensor_stem(layer, target)}.lora_A.weight"] = a.to(dtype)
            tensors[f"{tensor_stem(layer, target)}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def tensor_stem(layer: int, target: str) -> str:
    """Return the name of a target's tensors up to `lora_A`, as PEFT writes it."""
    module = "self_attn" if target in _ATTENTION else "mlp"
    return f"base_model.model.model.layers.{layer}.{module}.{target}"


def merge_adapter(model: Path, adapter: Path, merged: Path, *, scale: float) -> Path:
    """Write the model with `scale` * B @ A added to each target's weight, by hand."""
    shutil.copytree(model, merged)
    weights = load_file(model / "model.safetensors")
    low_rank = load_file(adapter / "adapter_model.safetensors")
    for name, a in low_rank.items():
        if name.endswith("lora_A.weight"):
            b = low_rank[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[target] += scale * (b.float() @ a.float())
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged

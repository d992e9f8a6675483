"""Model folders in eight bits, made from others: every way of storing them that is read.

Each is written beside a folder with the numbers that it stands for, which is what it must equal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

FLOAT8_LARGEST = 448.0
INT8_LARGEST = 127.0
BLOCK = (16, 24)
"""Rows and columns; neither divides every weight of a tiny model."""

GROUP = 8


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint stores it, by last part of the name, and what it stands for."""

    tensors: Tensors
    meaning: torch.Tensor


def _rounded(weight: torch.Tensor, scales: torch.Tensor, *, is_float: bool) -> torch.Tensor:
    if is_float:
        return (weight / scales).to(torch.float8_e4m3fn)
    return (weight / scales).round().clamp(-128, 127).to(torch.int8)


def _per_row(weight: torch.Tensor, *, is_float: bool) -> tuple[torch.Tensor, torch.Tensor]:
    largest = FLOAT8_LARGEST if is_float else INT8_LARGEST
    scales = weight.abs().amax(dim=1, keepdim=True) / largest
    return _rounded(weight, scales, is_float=is_float), scales


def _packed(values: torch.Tensor) -> Tensors:
    """Store int8 as compressed-tensors does: four numbers, counted from -128, in one integer."""
    rows, columns = values.shape
    padded = torch.zeros(rows, -(-columns // 4) * 4, dtype=torch.int64)
    padded[:, :columns] = values.long() + 128
    words = sum(padded[:, i::4] << (8 * i) for i in range(4))
    assert isinstance(words, torch.Tensor)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": signed, "weight_shape": torch.tensor(values.shape)}


def int8_rows(weight: torch.Tensor) -> Stored:
    values, scales = _per_row(weight, is_float=False)
    return Stored({"weight": values, "weight_scale": scales}, values.float() * scales)


def int8_rows_packed(weight: torch.Tensor) -> Stored:
    """With scales in bfloat16, as such checkpoints have them."""
    scales = _per_row(weight, is_float=False)[1].bfloat16()
    values = _rounded(weight, scales.float(), is_float=False)
    return Stored({**_packed(values), "weight_scale": scales}, values.float() * scales.float())


def int8_groups_packed(weight: torch.Tensor) -> Stored:
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // GROUP, GROUP)
    scales = grouped.abs().amax(dim=2) / INT8_LARGEST
    spread = scales.repeat_interleave(GROUP, dim=1)
    values = _rounded(weight, spread, is_float=False)
    return Stored({**_packed(values), "weight_scale": scales}, values.float() * spread)


def float8_rows(weight: torch.Tensor) -> Stored:
    values, scales = _per_row(weight, is_float=True)
    return Stored({"weight": values, "weight_scale": scales}, values.float() * scales)


def float8_whole(weight: torch.Tensor) -> Stored:
    """With a scale for activations beside it, as recipes that round those too leave one."""
    scale = weight.abs().max() / FLOAT8_LARGEST
    values = _rounded(weight, scale, is_float=True)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return Stored(tensors, values.float() * scale)


def float8_blocks(weight: torch.Tensor) -> Stored:
    rows, columns = weight.shape
    height, width = BLOCK
    scales = torch.empty(-(-rows // height), -(-columns // width))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = part.abs().max() / FLOAT8_LARGEST
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = _rounded(weight, spread, is_float=True)
    return Stored({"weight": values, "weight_scale_inv": scales}, values.float() * spread)


def bitsandbytes_rows(weight: torch.Tensor) -> Stored:
    largest = weight.abs().amax(dim=1)
    values = _rounded(weight, largest[:, None] / INT8_LARGEST, is_float=False)
    tensors = {
        "weight": values,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Stored(tensors, values.float() * (largest * (1 / 127))[:, None])


def compressed_tensors(layout: str, **weights: object) -> dict[str, object]:
    """Write the settings of one group of layers."""
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "weights": {"num_bits": 8, "symmetric": True, "actorder": None, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "quantization_status": "compressed",
    }


KINDS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, object]]] = {
    "int8 rows": (int8_rows, compressed_tensors("int-quantized", type="int", strategy="channel")),
    "int8 rows, packed": (
        int8_rows_packed,
        compressed_tensors("pack-quantized", type="int", strategy="channel"),
    ),
    "int8 groups, packed": (
        int8_groups_packed,
        compressed_tensors("pack-quantized", type="int", strategy="group", group_size=GROUP),
    ),
    "float8 rows": (
        float8_rows,
        compressed_tensors("float-quantized", type="float", strategy="channel"),
    ),
    "float8 blocks": (
        float8_blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "float8 whole weights": (float8_whole, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (float8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "bitsandbytes": (
        bitsandbytes_rows,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    ),
}
"""Ways to store weights, and what config.json says of each."""

KEPT_KINDS = (
    "fbgemm",
    "int8 rows",
    "int8 rows, packed",
    "float8 rows",
    "float8 whole weights",
    "bitsandbytes",
)
"""Those that compiled steps read as they are stored."""


def quantize(folder: Path, kind: str, *, into: Path) -> tuple[Path, Path]:
    """Write `folder` in eight bits, and the numbers that it then stands for; returns both."""
    store, settings = KINDS[kind]
    quantized, meaning = into / "quantized", into / "meaning"
    for target in (quantized, meaning):
        shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            result = store(weight.float())
            del stored[name]
            stem = name.removesuffix("weight")
            stored |= {stem + part: tensor for part, tensor in result.tensors.items()}
            meant[name] = result.meaning
    _save(stored, quantized)
    _save(meant, meaning)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, meaning


def _save(tensors: Tensors, folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})

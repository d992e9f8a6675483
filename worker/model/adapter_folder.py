"""Checks that a LoRA adapter can be served with a model, in milliseconds and without torch.

The layout is PEFT's: adapter_config.json beside adapter_model.safetensors. Whatever an adapter
asks for that worker.model.lora does not compute exactly is refused by name. It loads no weights.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from worker.model.config import ModelConfig, read_json
from worker.model.config_fields import ConfigFields
from worker.model.weights import tensor_shapes

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ATTENTION_TARGETS = TARGETS[:4]
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
"""Targets that a model of experts has once for each."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
}
"""Fields of adapter_config.json and what they may hold beside null."""

TensorKey = tuple[int, str, str]
"""Layer, target module, and A or B."""


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A checked adapter: what it adds is `scale` * B @ A to each target's weight.

    `tensors` names the tensor of each (layer, target, "A" or "B"); A is [rank, in] and B is
    [out, rank]. `digest` is the sha256 (hex) of both files.
    """

    folder: str
    rank: int
    scale: float
    tensors: dict[TensorKey, str]
    digest: str


def check_adapter_folder(folder: Path, model: ModelConfig | None) -> AdapterFolder:
    """Return what a folder holds; raise an error of one line that names what is wrong.

    DependencyError: files missing or damaged. ConfigError: an adapter of a kind that is not
    computed here, or one for a model of another shape; `model` None leaves shapes unchecked.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DependencyError(f"{folder} is not an adapter folder: {name} is missing")
    path = folder / CONFIG_FILE
    fields = ConfigFields(path, read_json(path))
    rank, scale = _rank_and_scale(fields)
    _refuse_unsupported(fields)
    shapes = tensor_shapes(folder / WEIGHTS_FILE)
    tensors = _tensors(folder, shapes)
    if model is not None:
        _check_shapes(folder, model, rank, {key: shapes[name] for key, name in tensors.items()})
    return AdapterFolder(
        folder=str(folder),
        rank=rank,
        scale=scale,
        tensors=tensors,
        digest=adapter_digest(folder),
    )


def adapter_digest(folder: Path) -> str:
    """Return the sha256 (hex) over configuration and weights, about 1 GB/s."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _rank_and_scale(fields: ConfigFields) -> tuple[int, float]:
    """Return r, and alpha / r or (rank-stabilised, Kalajdzievski 2023) alpha / sqrt(r)."""
    rank, alpha = fields.integer("r"), fields.raw.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ConfigError(f"{fields.path}: lora_alpha is {alpha!r}, expected a number")
    return rank, alpha / (math.sqrt(rank) if fields.flag("use_rslora", default=False) else rank)


def _refuse_unsupported(fields: ConfigFields) -> None:
    kind = fields.raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{fields.path}: peft_type is {kind!r}, only 'LORA' is served")
    for name, allowed in _UNSUPPORTED.items():
        fields.refuse_unless(name, *allowed)


def _tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[TensorKey, str]:
    """Find the place of every tensor; ConfigError names one that has none, or no counterpart."""
    tensors: dict[TensorKey, str] = {}
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is None or match[2] not in TARGETS:
            raise ConfigError(
                f"{folder}: tensor {name} is no low-rank matrix of {', '.join(TARGETS)}"
            )
        tensors[int(match[1]), match[2], match[3]] = name
    for layer, target, side in tensors:
        if (layer, target, "A" if side == "B" else "B") not in tensors:
            raise DependencyError(f"{folder}: {target} of layer {layer} has only lora_{side}")
    return tensors


def _check_shapes(
    folder: Path, model: ModelConfig, rank: int, shapes: dict[TensorKey, tuple[int, ...]]
) -> None:
    if not model.is_native:
        raise ConfigError(f"{folder}: adapters are not served on a {model.architecture}")
    widths = target_shapes(model)
    for (layer, target, side), found in shapes.items():
        if model.experts is not None and target in EXPERT_TARGETS:
            raise ConfigError(f"{folder}: adapters of experts are not served, found {target}")
        if layer >= model.num_layers:
            raise ConfigError(
                f"{folder}: the adapter has a layer {layer}, the model has {model.num_layers}"
            )
        if target in ATTENTION_TARGETS and model.has_state(layer):
            raise ConfigError(
                f"{folder}: layer {layer} of {model.architecture} has no attention, and the "
                f"adapter has a {target} for it"
            )
        out_size, in_size = widths[target]
        expected = (rank, in_size) if side == "A" else (out_size, rank)
        if found != expected:
            raise ConfigError(
                f"{folder}: lora_{side} of {target} in layer {layer} has shape {found}, "
                f"this model and r={rank} ask for {expected}"
            )


def target_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each target's weight."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }

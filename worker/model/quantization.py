"""How a checkpoint stores weights in eight bits, as its config.json says; torch-free.

Only weights are taken in eight bits: where a recipe rounds activations or keys and values too, they
stay in full precision here. It reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvindex.foundation.errors import ConfigError
from worker.model.config_fields import ConfigFields

UNUSED = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "k_scale",
    "output_scale",
    "v_scale",
    "weight_format",
)
"""Last parts of the names of tensors that matter to quantized activations, keys and values only."""

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside a weight in eight bits.

    `scales`: what the tensor of its scales may be called, in place of "weight". There is one for
    the whole weight, one per row, or one per block of one of the sizes in `blocks` (rows,
    columns). `unit` multiplies each.
    """

    scales: tuple[str, ...] = ("weight_scale",)
    blocks: tuple[tuple[int, int], ...] = ()
    unit: float = 1.0


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Read `quantization_config`; None where there is none.

    Raises ConfigError for a method that is not read here, or that asks for more than eight bits
    and scales.
    """
    section = fields.raw.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(f"{fields.path}: quantization_config is {section!r}, expected an object")
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(
            f"{fields.path}: quantization_config.quant_method {method!r} is not supported, only "
            f"{', '.join(_READERS)} in eight bits; serve a checkpoint of those, or one that is not "
            "quantized"
        )
    return _READERS[method](ConfigFields(fields.path, section))


def _compressed_tensors(fields: ConfigFields) -> Quantization:
    """Read the layout of llm-compressor; every group of layers must be in eight bits."""
    fields.refuse_unless("format", *_FORMATS, "mixed-precision")
    fields.refuse_unless("sparsity_config", {})
    fields.refuse_unless("transform_config", {})
    blocks = []
    for name, group in _section(fields, "config_groups").items():
        if not isinstance(group, dict):
            raise ConfigError(f"{fields.path}: config_groups.{name} is {group!r}, not an object")
        ConfigFields(fields.path, group).refuse_unless("format", *_FORMATS)
        if group.get("weights") is not None:
            weights = _section(ConfigFields(fields.path, group), "weights")
            blocks += _blocks_of_group(ConfigFields(fields.path, weights))
    return Quantization(blocks=tuple(blocks))


def _blocks_of_group(weights: ConfigFields) -> list[tuple[int, int]]:
    weights.refuse_unless("num_bits", 8)
    weights.refuse_unless("type", "int", "float")
    weights.refuse_unless("symmetric", True)
    weights.refuse_unless("strategy", "tensor", "channel", "group", "block")
    weights.refuse_unless("actorder", False, "weight", "static")
    match weights.raw.get("strategy"):
        case "group":
            return [(1, weights.integer("group_size"))]
        case "block":
            return [_block(weights, "block_structure")]
        case _:
            return []


def _fp8(fields: ConfigFields) -> Quantization:
    """Read the layout of DeepSeek and Qwen, in blocks or with one scale per weight."""
    fields.refuse_unless("fmt", "e4m3")
    fields.refuse_unless("expert_dtype", "fp8")
    is_blocked = fields.raw.get("weight_block_size") is not None
    blocks = (_block(fields, "weight_block_size"),) if is_blocked else ()
    return Quantization(scales=("weight_scale_inv", "weight_scale"), blocks=blocks)


def _fbgemm_fp8(fields: ConfigFields) -> Quantization:
    """Read the layout of FBGEMM, which has one scale per row and nothing to choose."""
    return Quantization()


def _bitsandbytes(fields: ConfigFields) -> Quantization:
    """Read LLM.int8 (Dettmers et al. 2022): its scales are each row's largest magnitude."""
    fields.refuse_unless("load_in_4bit", False)
    if fields.raw.get("load_in_8bit") is not True:
        raise ConfigError(
            f"{fields.path}: load_in_8bit is {fields.raw.get('load_in_8bit')!r}, expected true"
        )
    return Quantization(scales=("SCB",), unit=1 / 127)


_READERS: dict[str, Callable[[ConfigFields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitsandbytes": _bitsandbytes,
}


def _section(fields: ConfigFields, name: str) -> dict[str, Any]:
    section = fields.raw.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{fields.path}: {name} is {section!r}, expected an object")
    return section


def _block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    match fields.raw.get(name):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case value:
            raise ConfigError(f"{fields.path}: {name} is {value!r}, expected two positive integers")

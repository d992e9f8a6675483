"""Layers of a Llama whose projections stay in the eight bits that a folder stores them in.

For compiled steps, which read as many bytes less. Which names tensors have is what
worker.model.adapter_folder calls targets; other ways to store them are load_decoder's business.
"""

from __future__ import annotations

import torch

from worker.cpu.eight_bit import EightBitWeight, joined
from worker.model.adapter_folder import target_shapes
from worker.model.config import ModelConfig
from worker.model.llama import Layer
from worker.model.quantized_source import QuantizedSource

_KEPT = (torch.int8, torch.float8_e4m3fn)
"""What compiled code reads."""


def eight_bit_layers(source: QuantizedSource, config: ModelConfig) -> list[Layer] | None:
    """Load every layer; None when not all of their projections can stay as they are.

    They can when all are in the same eight bits, with a scale per row or for all rows.
    """
    layers: list[Layer] = []
    kinds: set[torch.dtype] = set()
    for index in range(config.num_layers):
        reader = _LayerReader(source, config, f"model.layers.{index}.")
        qkv = reader.fused("self_attn", "q_proj", "k_proj", "v_proj")
        out = reader.fused("self_attn", "o_proj")
        gate_up = reader.fused("mlp", "gate_proj", "up_proj")
        down = reader.fused("mlp", "down_proj")
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        kinds |= {weight.values.dtype for weight in (qkv, out, gate_up, down)}
        if len(kinds) > 1:
            return None
        layers.append(
            Layer(
                input_norm=reader.norm("input_layernorm"),
                qkv=qkv,
                qkv_bias=reader.qkv_bias() if config.qkv_bias else None,
                out=out,
                post_norm=reader.norm("post_attention_layernorm"),
                gate_up=gate_up,
                down=down,
            )
        )
    return layers


class _LayerReader:
    """The tensors of one layer."""

    def __init__(self, source: QuantizedSource, config: ModelConfig, prefix: str) -> None:
        self._source = source
        self._hidden_size = config.hidden_size
        self._shapes = target_shapes(config)
        self._prefix = prefix

    def fused(self, module: str, *targets: str) -> EightBitWeight | None:
        """Return some projections of a module as one; None when they cannot stay in eight bits."""
        parts: list[EightBitWeight] = []
        for target in targets:
            name = f"{self._prefix}{module}.{target}.weight"
            part = self._source.take_eight_bits(name, self._shapes[target])
            if part is None or not part.is_per_row or part.values.dtype not in _KEPT:
                return None
            parts.append(part)
        if len({part.values.dtype for part in parts}) > 1:
            return None
        return joined(parts)

    def qkv_bias(self) -> torch.Tensor:
        """Return the biases of queries, keys and values as one."""
        targets = ("q_proj", "k_proj", "v_proj")
        names = {target: f"{self._prefix}self_attn.{target}.bias" for target in targets}
        return torch.cat([self._source.take(names[t], self._shapes[t][:1]) for t in targets])

    def norm(self, name: str) -> torch.Tensor:
        """Return the weight of a norm."""
        return self._source.take(f"{self._prefix}{name}.weight", (self._hidden_size,))

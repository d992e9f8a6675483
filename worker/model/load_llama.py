"""Loads a folder's weights into a LlamaModel, in the precision that its steps read fastest.

The names of tensors are load_decoder's business.
"""

from __future__ import annotations

from pathlib import Path

import torch

from worker.cpu.compiled.choose import runs_compiled, runs_in_pairs
from worker.cpu.machine import has_matrix_bfloat16, has_native_bfloat16
from worker.model.calibration import calibrate
from worker.model.config import ModelConfig
from worker.model.decoder import DecoderLayer, FeedForward
from worker.model.eight_bit_layers import eight_bit_layers
from worker.model.llama import Layer, LlamaModel
from worker.model.load_decoder import load_ends, load_layers
from worker.model.quantized_source import QuantizedSource, open_weights
from worker.model.shard import shard_of
from worker.model.weight_memory import WeightMemory

_FEW_ROWS = 32
"""Up to this many rows reading the weights takes longer than the arithmetic."""


def load_llama(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    num_positions: int,
    compiled: bool | None = None,
    deterministic: bool = False,
) -> LlamaModel:
    """Load a folder's weights to compute in `dtype`; DependencyError names a tensor at fault.

    `compiled` None runs compiled where that is possible. Then weights stay in bfloat16, or in eight
    bits with a scale per row, if that is what the folder holds: the arithmetic is float32 in any
    case, and reads half or a quarter as much.
    """
    if compiled is None:
        compiled = runs_compiled(config)
    source, whole = open_weights(folder, config), shard_of(config, rank=0, size=1)
    kept = None
    if compiled and isinstance(source, QuantizedSource):
        kept = eight_bit_layers(source, config)
    # A number times its scale has more digits than bfloat16 holds.
    is_exact = kept is not None or config.quantization is None
    stays_half = compiled and is_exact and source.dtypes() == {"BF16"}
    stored = torch.bfloat16 if stays_half else dtype
    memory = None
    if compiled and config.quantization is None:
        num_bytes = source.num_elements * stored.itemsize
        memory = WeightMemory(num_bytes, num_tensors=source.num_tensors)
    layers = kept or [
        _llama_layer(layer, memory) for layer in load_layers(source, config, whole, dtype=stored)
    ]
    embedding, final_norm, head = load_ends(source, config, whole, dtype=stored)
    if memory is not None:
        is_tied = head is embedding
        head = memory.place(head)
        embedding = head if is_tied else memory.place(embedding)
        final_norm = memory.place(final_norm)
    is_half = dtype == stored == torch.bfloat16 and kept is None
    in_pairs = compiled and is_half and runs_in_pairs(config)
    compiled_rows = _compiled_rows(dtype, in_pairs=in_pairs, deterministic=deterministic)
    calibration = None
    if in_pairs:
        calibration = calibrate(
            config,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
        )
    return LlamaModel(
        config,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        num_positions=num_positions,
        dtype=dtype,
        compiled_rows=compiled_rows if compiled else 0,
        calibration=calibration,
    )


def _compiled_rows(dtype: torch.dtype, *, in_pairs: bool, deterministic: bool) -> int | None:
    """Return up to how many tokens a step runs compiled; None is any number.

    Many rows in bfloat16 belong to torch where a CPU has instructions for them that the compiled
    step does not use.
    """
    has_better = has_matrix_bfloat16() if in_pairs else has_native_bfloat16()
    return _FEW_ROWS if dtype == torch.bfloat16 and has_better and not deterministic else None


def _llama_layer(layer: DecoderLayer, memory: WeightMemory | None) -> Layer:
    """Return a layer, copied into `memory` if there is one, in the order that a step reads it."""
    assert isinstance(layer.mlp, FeedForward)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if memory is None else memory.place(tensor)

    return Layer(
        qkv=placed(layer.qkv),
        out=placed(layer.out),
        gate_up=placed(layer.mlp.gate_up),
        down=placed(layer.mlp.down),
        input_norm=placed(layer.input_norm),
        post_norm=placed(layer.mlp_norm),
        qkv_bias=None if layer.qkv_bias is None else placed(layer.qkv_bias),
    )

"""Converts a GGUF file of the Llama architecture to a Hugging Face folder in bfloat16.

Quantized weights are expanded once; no torch is needed. It knows neither caches nor packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from kvindex.foundation.errors import ConfigError, DependencyError
from worker.model.gguf_tokenizer import write_tokenizer

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path, *, progress: Callable[[float], None]) -> None:
    """Write config, tokenizer and weights of `source` into the existing `folder`.

    `progress` gets the share done, rising to 1. Raises DependencyError when the file cannot be
    read, ConfigError when it holds another architecture or tensors without a place.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise DependencyError(f"{source}: not readable as GGUF ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{source}: GGUF architecture {architecture!r} is not supported")
    _write_configs(fields, folder, tied=all(t.name != "output.weight" for t in reader.tensors))
    write_tokenizer(fields, folder)
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    arrays: dict[str, npt.NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _restore_rotary_rows(values, heads[part])
        arrays[_hugging_face_name(source, tensor.name)] = to_bfloat16(values)
        progress(done / len(reader.tensors))
    _save(arrays, folder / "model.safetensors")


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to bfloat16 bit patterns, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)
    return rounded


def _restore_rotary_rows(
    values: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of q and k rows: it interleaves the two halves of each head."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _hugging_face_name(source: Path, name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    if name in _TOP:
        return _TOP[name]
    raise ConfigError(f"{source}: tensor {name} has no place in a Llama model")


def _write_configs(fields: dict[str, Any], folder: Path, *, tied: bool) -> None:
    tokens = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        # GGUF stores float32; the decimal that was meant has far fewer digits.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")


def _save(arrays: dict[str, npt.NDArray[np.uint16]], file: Path) -> None:
    """Write the arrays, which hold bfloat16 bit patterns, as safetensors."""
    specs = {
        name: TensorSpec(
            dtype="bfloat16",
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    serialize_file(specs, file, metadata={"format": "pt"})

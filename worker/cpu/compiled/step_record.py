"""What a compiled step is told: one record of sizes and addresses, shared by its threads.

Addresses lead to contiguous arrays; activations are float32, or bfloat16 where they are multiplied
next and `in_pairs` is set; indices are int64, block tables int32.
"""

from __future__ import annotations

import numpy as np

_MODEL = (
    "num_layers",
    "hidden_size",
    "inner_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "ends_are_half",  # 1: embedding and head in bfloat16
    "in_pairs",  # 1: products of bfloat16 pairs, weights in panels; see pair_tiles.py
    "fine_channels",  # [2 * num_layers + 1, num_fine] of each norm in order
    "num_fine",
    "num_fine_gated",  # the first of inner_size; what their rounding left over stands behind all
    "key_offsets",  # [num_layers, num_kv_heads, head_dim] float32, see worker.model.calibration
    "storage",  # of the layers' products, an index into tiles.STORAGES
    "layers",  # [num_layers, len(LAYER)] addresses
    "embedding",  # [vocab_size, hidden_size]
    "final_norm",  # [hidden_size] float32
    "head",  # [vocab_size, hidden_size]
    "rotary",  # [2, num_positions, head_dim / 2] float32
    "num_positions",
    "num_parts",  # that the units of a stage are claimed in
    "tiles",  # addresses of the functions of worker.cpu.compiled.tiles
)
_CACHE = (
    "keys",  # [num_layers, blocks, block_size, num_kv_heads, head_dim]
    "values",
    "layer_bytes",
    "block_size",
    "cache_is_half",
)
_STEP = (
    "num_tokens",
    "num_rows",
    "num_segments",
    "is_decode",  # 1: each request has one token
    "table_width",
    "token_ids",  # [num_tokens]
    "positions",  # [num_tokens]
    "requests",  # [num_tokens] row of tables
    "tables",  # [requests, table_width]
    "segments",  # [num_segments, 2] first token, tokens: of one request, attended together
    "rows",  # [num_rows] tokens whose logits are wanted
)
_BUFFERS = (
    "hidden",  # [num_tokens, hidden_size]
    "normed",  # [num_tokens, hidden_size + num_fine]
    "qkv",  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    "attended",  # [num_tokens, num_heads * head_dim]
    "gated",  # [num_tokens, inner_size + num_fine_gated]
    "logits",  # [num_rows, vocab_size]
    "counters",  # zeros: for each stage one of units that are done, then one for each part
    "scratch",  # scratch_floats per thread
    "scratch_floats",
    "query_rows",  # of attention scratch
    "chunk",  # keys whose scores are held at a time
)

STEP = np.dtype(
    [(name, np.int64) for name in (*_MODEL, *_CACHE, *_STEP, *_BUFFERS)] + [("eps", np.float64)],
    align=True,
)

PRODUCTS = ("qkv", "out", "gate_up", "down")
NORMED = ("qkv", "gate_up")
"""Those of a layer, and those of them that multiply norms."""

PLACE = {name: place for place, name in enumerate(STEP.names or ())}
"""Where each field stands: all are eight bytes wide."""

LAYER = ("input_norm", *PRODUCTS, "post_norm", "qkv_bias", *(f"{name}_scales" for name in PRODUCTS))
"""Columns of `layers`; all but products are float32, and 0 stands for no bias and no scales."""

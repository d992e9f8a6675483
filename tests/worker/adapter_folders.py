"""Adapter folders without torch: the right names in the files, and weights that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

_STEM = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter_files(folder: Path, *, content: bytes = b"", **fields: object) -> Path:
    """Write an adapter of rank 1 on one projection; `content` tells its weights apart."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    data = content.ljust(32, b"\0")
    header = {
        f"{_STEM}.lora_A.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
        f"{_STEM}.lora_B.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + data
    )
    return folder

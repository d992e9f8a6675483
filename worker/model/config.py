"""What a model folder says of its architecture, read and checked without torch.

Hugging Face's config.json becomes one frozen Struct; whatever it asks for that we do not compute
exactly is refused by name. It reads no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError

RopeKind = Literal["default", "linear", "llama3"]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Architectures that worker.model.llama computes; they differ only in details of the config."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding; `factor` and what follows only matter to a scaled `kind`."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...] = ()


class _Fields:
    """Typed reads from config.json; every complaint names file and field."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.path}: {name} is {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.path}: {name} is {value!r}, expected a positive number")
        return float(value)

    def refuse_unless(self, name: str, *allowed: object) -> None:
        """Raise ConfigError when a present field asks for what is not computed here."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ConfigError(f"{self.path}: {name}={value!r} is not supported, only {choices}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ConfigError naming the file when it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """Parse config.json (and the end tokens of generation_config.json) of a model folder.

    Raises DependencyError when there is no config.json, ConfigError when the model is unsupported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise DependencyError(
            f"{folder} is not a Hugging Face model folder: config.json is missing"
        )
    fields = _Fields(path, read_json(path))
    architecture = _architecture(fields)
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("mlp_bias", False)
    fields.refuse_unless("quantization_config")
    fields.refuse_unless("pretraining_tp", 1)
    if architecture == "LlamaForCausalLM":
        fields.refuse_unless("attention_bias", False)
    if architecture == "MistralForCausalLM":
        fields.refuse_unless("sliding_window")
    fields.refuse_unless("use_sliding_window", False)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, max_position),
        tie_word_embeddings=bool(fields.raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        eos_token_ids=_eos_token_ids(folder, fields),
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or "none named"
    raise ConfigError(
        f"{fields.path}: unsupported architecture ({found}); "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _rope(fields: _Fields, max_position: int) -> RopeConfig:
    """Read both spellings: rope_theta beside rope_scaling, and the newer rope_parameters."""
    section = {
        **(fields.raw.get("rope_scaling") or {}),
        **(fields.raw.get("rope_parameters") or {}),
    }
    rope = _Fields(fields.path, section)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.number("factor", 1.0))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor", 8.0),
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 4.0),
            original_max_position=rope.integer("original_max_position_embeddings", max_position),
        )
    raise ConfigError(
        f"{fields.path}: rope scaling {kind!r} is not supported, only default, linear, llama3"
    )


def _eos_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    """Return the end tokens; generation_config.json wins over config.json, as in transformers."""
    value = fields.raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        value = read_json(generation).get("eos_token_id", value)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{folder}: eos_token_id is {value!r}, expected integers")
    return tuple(ids)

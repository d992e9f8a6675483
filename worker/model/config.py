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
from worker.model import granite_fields
from worker.model.config_fields import ConfigFields
from worker.model.lfm2_fields import as_llama
from worker.model.mamba_config import MambaConfig, read_mamba
from worker.model.quantization import Quantization, read_quantization
from worker.model.rope_config import RopeConfig, read_local_rope, read_rope

Activation = Literal["silu", "gelu_tanh"]

Reach = int | Literal["state"] | None
"""What a layer reads of the past: so many tokens, itself included, a state of them, or all."""

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Lfm2ForCausalLM",
    "GraniteMoeHybridForCausalLM",
)
"""Architectures that are computed here; they only differ in details of the config.

Any other causal language model runs through the modules of transformers.
"""

_LLAMA_LIKE = SUPPORTED_ARCHITECTURES[:3]
_WITH_QK_NORM = SUPPORTED_ARCHITECTURES[3:7]
_LFM2 = "Lfm2ForCausalLM"
_CAUSAL_LM_NAMES = ("ForCausalLM", "LMHeadModel")
_GEMMA3 = "Gemma3ForCausalLM"
_GRANITE = "GraniteMoeHybridForCausalLM"
_QWEN3_MOE = "Qwen3MoeForCausalLM"


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of one feed-forward; `num_chosen` of them per token.

    `renormalise`: the weights of the chosen ones are made to add up to 1. `has_shared`: the usual
    feed-forward stands beside them.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    renormalise: bool
    has_shared: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder and what sets its family apart from Llama.

    `windows`: what each layer reads of the past; empty when every layer reads everything.
    `conv_kernel`: inputs that a short convolution reads, which is what layers with a state are,
    unless there is a `mamba`. `local_rope` is for layers with a window, where they have their
    own. `qk_norm`: queries and keys of a head are normed. `gemma_norms`: norms before and behind
    each half of a layer, with weights that count from 1. `query_scale` replaces the head size in
    the attention's scale; `embedding_scale` multiplies the embedding, `residual_scale` what a
    layer adds to it, and logits are divided by `logits_divisor`. `quantization` says how the
    weights are stored, None as they are.
    """

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
    windows: tuple[Reach, ...] = ()
    conv_kernel: int | None = None
    mamba: MambaConfig | None = None
    local_rope: RopeConfig | None = None
    qk_norm: bool = False
    gemma_norms: bool = False
    query_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    activation: Activation = "silu"
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None

    @property
    def inner_size(self) -> int:
        """Columns between the two products of a feed-forward, or of one expert."""
        return self.intermediate_size if self.experts is None else self.experts.inner_size

    @property
    def is_native(self) -> bool:
        """Whether it is computed here; else by transformers, which reads its other settings."""
        return self.architecture in SUPPORTED_ARCHITECTURES

    def has_state(self, layer: int) -> bool:
        """Tell whether a layer keeps a state in place of keys and values."""
        return bool(self.windows) and self.windows[layer] == "state"

    @property
    def is_scaled(self) -> bool:
        """Whether embedding, residuals, scores or logits are multiplied by the family's numbers."""
        factors = {self.embedding_scale, self.residual_scale, self.logits_divisor}
        return factors != {1.0} or self.query_scale is not None

    @property
    def is_llama_like(self) -> bool:
        """Whether it is Llama up to a bias: worker.model.llama computes it."""
        return self.architecture in _LLAMA_LIKE and not self.windows


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
    fields = ConfigFields(path, read_json(path))
    architecture = _architecture(fields)
    if architecture not in SUPPORTED_ARCHITECTURES:
        return _foreign_config(folder, fields, architecture)
    _refuse_what_is_not_computed(fields, architecture)
    if architecture == _LFM2:
        fields = as_llama(fields)
    if architecture == _GRANITE:
        fields = granite_fields.in_usual_names(fields)
    is_gemma, is_granite = architecture == _GEMMA3, architecture == _GRANITE
    has_own_scale = is_gemma or is_granite
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    windows = _windows(fields, architecture)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", 256 if is_gemma else hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, architecture, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=is_gemma),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        eos_token_ids=_eos_token_ids(folder, fields),
        windows=windows,
        conv_kernel=fields.integer("conv_L_cache", 3) if architecture == _LFM2 else None,
        mamba=read_mamba(fields) if is_granite and "state" in windows else None,
        local_rope=read_local_rope(fields, max_position) if is_gemma else None,
        qk_norm=architecture in _WITH_QK_NORM,
        gemma_norms=is_gemma,
        query_scale=fields.number("query_pre_attn_scalar", 256.0) if has_own_scale else None,
        embedding_scale=_embedding_scale(fields, architecture, hidden_size),
        residual_scale=fields.number("residual_multiplier", 1.0) if is_granite else 1.0,
        logits_divisor=fields.number("logits_scaling", 1.0) if is_granite else 1.0,
        activation="gelu_tanh" if is_gemma else "silu",
        experts=_experts(fields, architecture),
        quantization=read_quantization(fields),
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def _architecture(fields: ConfigFields) -> str:
    names = fields.raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES or str(name).endswith(_CAUSAL_LM_NAMES):
            return str(name)
    found = ", ".join(map(str, names)) or "none named"
    raise ConfigError(
        f"{fields.path}: unsupported architecture ({found}); "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}, and others by way of transformers "
        f"that end in {' or '.join(_CAUSAL_LM_NAMES)}"
    )


def _foreign_config(folder: Path, fields: ConfigFields, architecture: str) -> ModelConfig:
    """Read the shape of a model that transformers computes; each family has its own names.

    The module is checked against it when it is loaded.
    """
    if fields.raw.get("quantization_config") is not None:
        raise ConfigError(
            f"{fields.path}: {architecture} runs through transformers, where quantization_config "
            f"is not supported; it is for {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    hidden_size = fields.integer_of("hidden_size", "n_embd", "d_model")
    num_heads = fields.integer_of("num_attention_heads", "n_head", "n_heads")
    max_position = fields.integer_of("max_position_embeddings", "n_positions", "max_seq_len")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 4 * hidden_size),
        num_layers=_num_layers(fields),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=1e-6,
        max_position=max_position,
        rope=RopeConfig(theta=10_000.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        qkv_bias=False,
        eos_token_ids=_eos_token_ids(folder, fields),
        windows=_windows(fields, architecture),
    )


def _refuse_what_is_not_computed(fields: ConfigFields, architecture: str) -> None:
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("hidden_activation", "gelu_pytorch_tanh")
    fields.refuse_unless("mlp_bias", False)
    fields.refuse_unless("pretraining_tp", 1)
    if architecture != "Qwen2ForCausalLM":
        fields.refuse_unless("attention_bias", False)
    fields.refuse_unless("attn_logit_softcapping")
    fields.refuse_unless("final_logit_softcapping")
    fields.refuse_unless("use_bidirectional_attention", False)
    fields.refuse_unless("decoder_sparse_step", 1)
    fields.refuse_unless("mlp_only_layers", [])


def _windows(fields: ConfigFields, architecture: str) -> tuple[Reach, ...]:
    """Return what each layer reads of the past, () when every layer reads everything."""
    if architecture == _LFM2:
        return _kinds(fields, {"conv": "state", "full_attention": None})
    if architecture == _GRANITE:
        return _kinds(fields, {"linear_attention": "state", "full_attention": None})
    is_qwen = architecture.startswith("Qwen")
    used = fields.flag("use_sliding_window", default=False) if is_qwen else True
    if not used or architecture == "LlamaForCausalLM" or fields.raw.get("sliding_window") is None:
        return ()
    window = fields.integer("sliding_window")
    num_layers = _num_layers(fields)
    windows: tuple[Reach, ...]
    if fields.raw.get("layer_types") is not None:
        return _kinds(fields, {"sliding_attention": window, "full_attention": None})
    if is_qwen:
        first = fields.raw.get("max_window_layers", 28)
        windows = tuple(window if i >= first else None for i in range(num_layers))
    elif architecture == _GEMMA3:
        pattern = fields.integer("sliding_window_pattern", 6)
        windows = tuple(window if (i + 1) % pattern else None for i in range(num_layers))
    else:
        windows = (window,) * num_layers
    return windows if any(windows) else ()


def _kinds(fields: ConfigFields, known: dict[str, Reach]) -> tuple[Reach, ...]:
    """Read `layer_types`, which may only hold what is known."""
    kinds = fields.raw["layer_types"]
    if len(kinds) != _num_layers(fields) or not known.keys() >= set(kinds):
        raise ConfigError(f"{fields.path}: layer_types={kinds!r} is not supported")
    reaches = tuple(known[kind] for kind in kinds)
    return reaches if any(reaches) else ()


def _num_layers(fields: ConfigFields) -> int:
    return fields.integer_of("num_hidden_layers", "n_layer", "n_layers")


def _rope(fields: ConfigFields, architecture: str, max_position: int) -> RopeConfig:
    if architecture == _GRANITE and not granite_fields.has_rotation(fields):
        return RopeConfig(theta=1.0, kind="none")
    return read_rope(fields, max_position)


def _embedding_scale(fields: ConfigFields, architecture: str, hidden_size: int) -> float:
    if architecture == _GRANITE:
        return fields.number("embedding_multiplier", 1.0)
    return hidden_size**0.5 if architecture == _GEMMA3 else 1.0


def _experts(fields: ConfigFields, architecture: str) -> ExpertsConfig | None:
    """Read a mixture of experts; its number goes by two names."""
    is_granite = architecture == _GRANITE
    if architecture != _QWEN3_MOE and not (is_granite and granite_fields.has_experts(fields)):
        return None
    name = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    return ExpertsConfig(
        num_experts=fields.integer(name),
        num_chosen=fields.integer("num_experts_per_tok"),
        inner_size=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", default=False),
        has_shared=is_granite,
    )


def _eos_token_ids(folder: Path, fields: ConfigFields) -> tuple[int, ...]:
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

"""What Granite 4 writes in a config.json under names of its own, in those of other families.

It knows no layers.
"""

from __future__ import annotations

from worker.model.config_fields import ConfigFields

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of what a layer is."""


def has_experts(fields: ConfigFields) -> bool:
    """Tell whether a mixture of experts stands beside the feed-forward of every layer."""
    return bool(fields.raw.get("num_local_experts", 8) != 0)


def has_rotation(fields: ConfigFields) -> bool:
    """Tell whether attention rotates queries and keys by their positions."""
    return bool(fields.raw.get("position_embedding_type") == "rope")


def in_usual_names(fields: ConfigFields) -> ConfigFields:
    """Return the settings as others name them; ConfigError for one that is not computed."""
    fields.refuse_unless("normalization_function", "rmsnorm")
    fields.refuse_unless("position_embedding_type", "rope", "nope")
    raw = dict(fields.raw)
    if has_experts(fields):
        fields.refuse_unless("quantization_config")
        raw["num_experts"] = fields.integer("num_local_experts", 8)
        raw["num_experts_per_tok"] = fields.integer("num_experts_per_tok", 2)
        raw["moe_intermediate_size"] = fields.integer("intermediate_size", 11008)
        raw["norm_topk_prob"] = True
    raw["intermediate_size"] = fields.integer("shared_intermediate_size", 1024)
    # Scores are multiplied by it; others divide them by the root of what they name.
    raw["query_pre_attn_scalar"] = fields.number("attention_multiplier", 1.0) ** -2
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    if kinds is None:
        kinds = ["linear_attention"] * fields.integer("num_hidden_layers")
    raw["layer_types"] = [_KINDS.get(kind, kind) for kind in kinds]
    return ConfigFields(fields.path, raw)

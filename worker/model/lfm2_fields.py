"""What LFM2 writes in a config.json under names of its own, in those of Llama.

It knows no layers.
"""

from __future__ import annotations

from worker.model.config_fields import ConfigFields

_THETA = 1_000_000.0


def as_llama(fields: ConfigFields) -> ConfigFields:
    """Return the same settings as Llama names them; ConfigError for one that is not computed."""
    fields.refuse_unless("conv_bias", False)
    raw = dict(fields.raw)
    raw["rms_norm_eps"] = fields.number("norm_eps", 1e-5)
    raw["rope_theta"] = fields.number("rope_theta", _THETA)
    raw["intermediate_size"] = _inner_size(fields)
    raw["tie_word_embeddings"] = fields.flag(
        "tie_embedding", default=fields.flag("tie_word_embeddings", default=True)
    )
    if raw.get("layer_types") is None:
        num_layers = fields.integer("num_hidden_layers")
        with_attention = raw.get("full_attn_idxs") or range(num_layers)
        raw["layer_types"] = [
            "full_attention" if i in with_attention else "conv" for i in range(num_layers)
        ]
    return ConfigFields(fields.path, raw)


def _inner_size(fields: ConfigFields) -> int:
    """Return the columns of the feed-forward: two thirds of what is named, rounded up."""
    named = "block_ff_dim" if fields.raw.get("block_ff_dim") is not None else "intermediate_size"
    size = fields.integer(named)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    scaled = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-scaled // multiple) * multiple

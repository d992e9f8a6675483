"""Loads a folder's weights into a Decoder, or the part of them that one rank holds.

It knows the names that checkpoints give to tensors, and which rows and columns a rank takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F

from kvindex.foundation.errors import DependencyError
from worker.model.config import ExpertsConfig, ModelConfig
from worker.model.decoder import Decoder, DecoderLayer, DecoderWeights, Experts, FeedForward
from worker.model.kv_layout import kv_layout
from worker.model.load_mamba import load_mamba
from worker.model.parallel import ALONE, RankGroup
from worker.model.quantized_source import open_weights
from worker.model.shard import Shard, local_config, shard_of
from worker.model.weights import WeightSource

_LFM2_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
"""What LFM2 calls its parts, by what others do."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    num_positions: int,
    ranks: RankGroup = ALONE,
) -> Decoder:
    """Load the part of `ranks.rank` in `dtype`; DependencyError naming the tensor at fault."""
    shard = shard_of(config, rank=ranks.rank, size=ranks.size)
    return Decoder(
        local_config(config, shard),
        layout=kv_layout(config.num_layers, config.windows),
        weights=load_weights(folder, config, shard, dtype=dtype),
        num_positions=num_positions,
        ranks=ranks,
    )


def load_weights(
    folder: Path, config: ModelConfig, shard: Shard, *, dtype: torch.dtype
) -> DecoderWeights:
    """Load what `shard` names in `dtype`; raises DependencyError naming the tensor at fault."""
    source = open_weights(folder, config)
    layers = list(load_layers(source, config, shard, dtype=dtype))
    embedding, final_norm, head = load_ends(source, config, shard, dtype=dtype)
    return DecoderWeights(embedding, layers, final_norm, head)


def load_layers(
    source: WeightSource, config: ModelConfig, shard: Shard, *, dtype: torch.dtype
) -> Iterator[DecoderLayer]:
    """Load what lies between the ends, layer by layer."""
    for index in range(config.num_layers):
        yield _LayerSource(source, config, shard, index, dtype).layer()


def load_ends(
    source: WeightSource, config: ModelConfig, shard: Shard, *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load embedding, final norm and head, last of all: a tensor nobody took is refused then."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    embedding = source.take("model.embed_tokens.weight", embedding_shape).to(dtype)
    final_norm = _norm_weight(
        source.take(_named(config, "model.norm.weight"), (config.hidden_size,)), config, dtype
    )
    head = embedding
    if not config.tie_word_embeddings:
        head = source.take("lm_head.weight", embedding_shape)
    _refuse_untaken(source, config)
    if head is not embedding or shard.vocab != range(config.vocab_size):
        head = _padded(_rows(head, shard.vocab).to(dtype), shard.vocab_rows)
    return embedding, final_norm, head


def _refuse_untaken(source: WeightSource, config: ModelConfig) -> None:
    """Refuse weights that the computation would ignore: the answers would be quietly wrong."""
    for name in source.untaken():
        harmless = name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and config.tie_word_embeddings
        )
        if not harmless:
            raise DependencyError(
                f"{source.folder}: tensor {name} has no place in {config.architecture}; "
                "the folder holds another model than its config.json says"
            )


class _LayerSource:
    """The tensors of one layer, cut to what a shard holds."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        shard: Shard,
        index: int,
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._config = config
        self._shard = shard
        self._index = index
        self._prefix = f"model.layers.{index}."
        self._dtype = dtype

    def layer(self) -> DecoderLayer:
        """Return the layer."""
        if self._config.has_state(self._index):
            return self._conv_layer() if self._config.mamba is None else self._mamba_layer()
        config = self._config
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        out = self._take("self_attn.o_proj.weight", hidden, q_size)
        names = {
            "after_attention": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
        if not config.gemma_norms:
            names = {"mlp_norm": "post_attention_layernorm"}
        norms = {field: self._norm(f"{name}.weight", hidden) for field, name in names.items()}
        return DecoderLayer(
            input_norm=self._norm("input_layernorm.weight", hidden),
            qkv=torch.cat(self._qkv("weight", hidden)),
            qkv_bias=torch.cat(self._qkv("bias")) if config.qkv_bias else None,
            q_norm=self._head_norm("q_norm", scale=self._query_factor) if config.qk_norm else None,
            k_norm=self._head_norm("k_norm") if config.qk_norm else None,
            out=_columns(out, _scaled(self._shard.heads, config.head_dim)).to(self._dtype),
            after_attention=norms.get("after_attention"),
            mlp_norm=norms["mlp_norm"],
            mlp=self._mlp(),
            after_mlp=norms.get("after_mlp"),
        )

    def _conv_layer(self) -> DecoderLayer:
        """Return a layer with a short convolution, of this rank's channels."""
        hidden, kernel = self._config.hidden_size, self._config.conv_kernel
        assert kernel is not None
        channels = self._shard.channels
        gates = self._take("conv.in_proj.weight", 3 * hidden, hidden)
        out = self._take("conv.out_proj.weight", hidden, hidden)
        taps = self._take("conv.conv.weight", hidden, 1, kernel)
        return DecoderLayer(
            input_norm=self._norm("input_layernorm.weight", hidden),
            qkv=torch.cat([_rows(part, channels) for part in gates.chunk(3)]).to(self._dtype),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=_columns(out, channels).to(self._dtype),
            after_attention=None,
            mlp_norm=self._norm("post_attention_layernorm.weight", hidden),
            mlp=self._mlp(),
            after_mlp=None,
            taps=_rows(taps.squeeze(1), channels).t().contiguous().to(self._dtype),
        )

    def _mamba_layer(self) -> DecoderLayer:
        """Return a layer with a state-space mixer, which is never shared by ranks."""
        hidden, mamba = self._config.hidden_size, self._config.mamba
        assert mamba is not None
        into = self._take("mamba.in_proj.weight", mamba.projected_size, hidden)
        out = self._take("mamba.out_proj.weight", hidden, mamba.inner_size)
        return DecoderLayer(
            input_norm=self._norm("input_layernorm.weight", hidden),
            qkv=into.to(self._dtype),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=out.to(self._dtype),
            after_attention=None,
            mlp_norm=self._norm("post_attention_layernorm.weight", hidden),
            mlp=self._mlp(),
            after_mlp=None,
            mamba=load_mamba(self._take, mamba, dtype=self._dtype),
        )

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(self._prefix + _named(self._config, name), shape)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return _norm_weight(self._take(name, size), self._config, self._dtype)

    def _head_norm(self, name: str, *, scale: float = 1.0) -> torch.Tensor:
        weight = self._norm(f"self_attn.{name}.weight", self._config.head_dim)
        return weight if scale == 1.0 else weight * scale

    @property
    def _query_factor(self) -> float:
        """What turns the usual scale of attention, head size ** -0.5, into the family's."""
        scale = self._config.query_scale
        return 1.0 if scale is None else math.sqrt(self._config.head_dim / scale)

    def _qkv(self, kind: str, *columns: int) -> list[torch.Tensor]:
        """Return this rank's rows of the three projections."""
        size, shard = self._config.head_dim, self._shard
        parts = []
        for name, count, heads in (
            ("q_proj", self._config.num_heads, shard.heads),
            ("k_proj", self._config.num_kv_heads, shard.kv_heads),
            ("v_proj", self._config.num_kv_heads, shard.kv_heads),
        ):
            whole = self._take(f"self_attn.{name}.{kind}", count * size, *columns)
            parts.append(_rows(whole, _scaled(heads, size)).to(self._dtype))
        return parts

    def _mlp(self) -> FeedForward | Experts:
        config = self._config.experts
        if self._config.architecture == "GraniteMoeHybridForCausalLM":
            shared = self._fused_feed_forward()
            return shared if config is None else self._fused_experts(config, shared)
        if config is None:
            return self._feed_forward("mlp")
        router = self._take("mlp.gate.weight", config.num_experts, self._config.hidden_size)
        members = [self._feed_forward(f"mlp.experts.{i}") for i in range(config.num_experts)]
        return Experts(router.to(self._dtype), members)

    def _fused_feed_forward(self) -> FeedForward:
        """Return Granite's feed-forward, whose gate and up are one tensor."""
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        own = self._shard.inner if self._config.experts is None else range(inner)
        gate_up = self._take("shared_mlp.input_linear.weight", 2 * inner, hidden)
        down = self._take("shared_mlp.output_linear.weight", hidden, inner)
        return FeedForward(
            torch.cat([_rows(part, own) for part in gate_up.chunk(2)]).to(self._dtype),
            _columns(down, own).to(self._dtype),
        )

    def _fused_experts(self, config: ExpertsConfig, shared: FeedForward) -> Experts:
        """Return Granite's experts, all of them one tensor too; they are never shared by ranks."""
        hidden, count, inner = self._config.hidden_size, config.num_experts, config.inner_size
        gate_up = self._take("block_sparse_moe.input_linear.weight", count, 2 * inner, hidden)
        down = self._take("block_sparse_moe.output_linear.weight", count, hidden, inner)
        router = self._take("block_sparse_moe.router.layer.weight", count, hidden)
        parts = zip(gate_up.to(self._dtype), down.to(self._dtype), strict=True)
        return Experts(router.to(self._dtype), [FeedForward(*part) for part in parts], shared)

    def _feed_forward(self, prefix: str) -> FeedForward:
        hidden, inner = self._config.hidden_size, self._config.inner_size
        gate_up = [
            _rows(self._take(f"{prefix}.{name}.weight", inner, hidden), self._shard.inner)
            for name in ("gate_proj", "up_proj")
        ]
        down = self._take(f"{prefix}.down_proj.weight", hidden, inner)
        return FeedForward(
            torch.cat(gate_up).to(self._dtype), _columns(down, self._shard.inner).to(self._dtype)
        )


def _named(config: ModelConfig, name: str) -> str:
    """Return what the family calls a tensor that Llama calls so."""
    if config.architecture != "Lfm2ForCausalLM":
        return name
    part, _, kind = name.rpartition(".")
    return f"{_LFM2_NAMES.get(part, part)}.{kind}"


def _norm_weight(weight: torch.Tensor, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Return a norm's weight; one that counts from 1 stays in float32, as its family computes."""
    return weight.float() + 1.0 if config.gemma_norms else weight.to(dtype)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _rows(weight: torch.Tensor, rows: range) -> torch.Tensor:
    return weight[rows.start : rows.stop]


def _columns(weight: torch.Tensor, columns: range) -> torch.Tensor:
    return weight[:, columns.start : columns.stop].contiguous()


def _padded(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight

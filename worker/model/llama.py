"""The Llama family: pre-norm decoder, rotary grouped-query attention, gated SiLU.

Also computes Mistral (without sliding window) and Qwen2 (bias on q, k, v). It sees one flattened
batch of tokens; which requests they belong to is the plan's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from kvindex.foundation.errors import DependencyError
from worker.cpu.attention import AttentionPlan, paged_attention
from worker.cpu.linear import linear
from worker.model.config import ModelConfig
from worker.model.rotary import apply_rotary, rotary_table
from worker.model.weights import WeightSource


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights of one decoder layer, [out, in]; q, k, v and gate, up are fused."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True, frozen=True)
class KVCache:
    """Paged keys and values, each [layers, blocks, block_size, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store [tokens, kv_heads, head_dim] at `slots` (block_id * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key.to(self.keys.dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value.to(self.values.dtype))


class LlamaModel:
    """Weights and forward pass of one model in one precision; immutable once loaded."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        num_positions: int,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary_table(
            config.rope, head_dim=config.head_dim, num_positions=num_positions
        )

    @property
    def dtype(self) -> torch.dtype:
        """The precision of weights and activations."""
        return self._embedding.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a flattened batch; write its KV; return float32 logits of `rows` alone.

        token_ids, positions [tokens] int64; rows [sampled] int64; result [sampled, vocab_size].
        """
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._rotary[:, positions, None, :]
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attention(index, normed, cos, sin, cache, plan)
            gate, up = linear(self._norm(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(F.silu(gate) * up, layer.down)
        return linear(self._norm(hidden[rows], self._final_norm), self._head).float()

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        config, layer = self.config, self._layers[index]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        rotated = apply_rotary(qkv[:, : heads + kv_heads], cos, sin)
        cache.write(index, plan.slots, rotated[:, heads:], qkv[:, heads + kv_heads :])
        query = rotated[:, :heads]
        attended = paged_attention(query, cache.keys[index], cache.values[index], plan)
        return linear(attended.flatten(1), layer.out)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def load_llama(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, num_positions: int
) -> LlamaModel:
    """Load a folder's weights in `dtype`; raises DependencyError naming the tensor at fault."""
    source = WeightSource(folder)
    embedding_shape = (config.vocab_size, config.hidden_size)
    embedding = source.take("model.embed_tokens.weight", embedding_shape).to(dtype)
    layers = [_load_layer(source, config, index, dtype) for index in range(config.num_layers)]
    final_norm = source.take("model.norm.weight", (config.hidden_size,)).to(dtype)
    head = embedding
    if not config.tie_word_embeddings:
        head = source.take("lm_head.weight", embedding_shape).to(dtype)
    _refuse_untaken(folder, source, config)
    return LlamaModel(
        config,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        num_positions=num_positions,
    )


def _load_layer(source: WeightSource, config: ModelConfig, index: int, dtype: torch.dtype) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))

    def take(name: str, *shape: int) -> torch.Tensor:
        return source.take(f"model.layers.{index}.{name}", shape).to(dtype)

    qkv = torch.cat([take(f"self_attn.{name}.weight", size, hidden) for name, size in projections])
    qkv_bias = None
    if config.qkv_bias:
        qkv_bias = torch.cat([take(f"self_attn.{name}.bias", size) for name, size in projections])
    gate_up = [take(f"mlp.{name}.weight", inner, hidden) for name in ("gate_proj", "up_proj")]
    return Layer(
        input_norm=take("input_layernorm.weight", hidden),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=take("self_attn.o_proj.weight", hidden, q_size),
        post_norm=take("post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(gate_up),
        down=take("mlp.down_proj.weight", hidden, inner),
    )


def _refuse_untaken(folder: Path, source: WeightSource, config: ModelConfig) -> None:
    """Refuse weights that the computation would ignore: the answers would be quietly wrong."""
    for name in source.untaken():
        harmless = name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and config.tie_word_embeddings
        )
        if not harmless:
            raise DependencyError(
                f"{folder}: tensor {name} has no place in {config.architecture}; "
                "the folder holds another model than its config.json says"
            )

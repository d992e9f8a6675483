"""The Llama family: pre-norm decoder, rotary grouped-query attention, gated SiLU.

Also computes Mistral (without sliding window) and Qwen2 (bias on q, k, v). It sees one flattened
batch of tokens; which requests they belong to is the plan's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from kvindex.foundation.errors import DependencyError
from worker.cpu.attention import AttentionPlan, PlainPlan, paged_attention, plain_plan
from worker.cpu.compiled.choose import runs_compiled
from worker.cpu.linear import linear
from worker.cpu.machine import has_native_bfloat16
from worker.model.config import ModelConfig
from worker.model.lora import NO_ADAPTERS, BatchAdapters
from worker.model.rotary import apply_rotary, rotary_table
from worker.model.weights import WeightSource

if TYPE_CHECKING:
    from worker.cpu.compiled.forward import CompiledForward

_FEW_ROWS = 32
"""Up to this many rows reading the weights takes longer than the arithmetic."""


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
    """Weights and forward pass of one model in one precision; immutable once loaded.

    Steps of up to `compiled_rows` tokens run compiled, all if None. `tap`, if set, is given the
    hidden states [tokens, hidden_size] of each step, before the last norm; none runs compiled then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        num_positions: int,
        dtype: torch.dtype,
        compiled_rows: int | None = 0,
    ) -> None:
        self.config = config
        self._dtype = dtype
        self.tap: Callable[[torch.Tensor], None] | None = None
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary_table(
            config.rope, head_dim=config.head_dim, num_positions=num_positions
        )
        self._compiled_rows = compiled_rows
        self._compiled = None if compiled_rows == 0 else self._compile()

    @property
    def rotary(self) -> torch.Tensor:
        """Cosines and sines of positions, [2, num_positions, head_dim / 2]."""
        return self._rotary

    @property
    def dtype(self) -> torch.dtype:
        """The precision of activations and KV; weights may be stored in a narrower one."""
        return self._dtype

    def _suits(self, num_tokens: int, adapters: BatchAdapters) -> bool:
        """Tell whether a step is to run compiled."""
        is_few = self._compiled_rows is None or num_tokens <= self._compiled_rows
        return is_few and not adapters.groups

    def _compile(self) -> CompiledForward:
        from worker.cpu.compiled.forward import CompiledForward

        return CompiledForward(
            self.config,
            embedding=self._embedding,
            layers=self._layers,
            final_norm=self._final_norm,
            head=self._head,
            rotary=self._rotary,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor,
        adapters: BatchAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute a flattened batch; write its KV; return float32 logits of `rows` alone.

        token_ids, positions [tokens] int64; rows [sampled] int64; result [sampled, vocab_size].
        `adapters` say which tokens run with which LoRA adapter.
        """
        has_tap = self.tap is not None
        if self._compiled is not None and not has_tap and self._suits(len(token_ids), adapters):
            return self._compiled(token_ids, positions, cache=cache, plan=plan, rows=rows)
        layout = plain_plan(plan)
        hidden = F.embedding(token_ids, self._embedding).to(self._dtype)
        cos, sin = self._rotary[:, positions, None, :]
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attention(index, normed, cos, sin, cache, layout, adapters)
            normed = self._norm(hidden, layer.post_norm)
            gate_up = adapters.add(index, "gate_up", normed, linear(normed, layer.gate_up))
            gate, up = gate_up.chunk(2, dim=-1)
            gated = F.silu(gate) * up
            hidden = hidden + adapters.add(index, "down", gated, linear(gated, layer.down))
        if self.tap is not None:
            self.tap(hidden)
        return linear(self._norm(hidden[rows], self._final_norm), self._head).float()

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        plan: PlainPlan,
        adapters: BatchAdapters,
    ) -> torch.Tensor:
        config, layer = self.config, self._layers[index]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        fused = adapters.add(index, "qkv", x, linear(x, layer.qkv, layer.qkv_bias))
        qkv = fused.view(len(x), -1, config.head_dim)
        rotated = apply_rotary(qkv[:, : heads + kv_heads], cos, sin)
        cache.write(index, plan.slots, rotated[:, heads:], qkv[:, heads + kv_heads :])
        query = rotated[:, :heads]
        attended = paged_attention(query, cache.keys[index], cache.values[index], plan).flatten(1)
        return adapters.add(index, "out", attended, linear(attended, layer.out))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.rms_norm_eps)


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

    `compiled` None runs compiled where that is possible. Then weights stay in bfloat16 if that is
    what the folder holds: the arithmetic is float32 in any case, and reads half as much.
    """
    if compiled is None:
        compiled = runs_compiled(config)
    source = WeightSource(folder)
    embedding_shape = (config.vocab_size, config.hidden_size)
    stored = torch.bfloat16 if compiled and source.dtypes() == {"BF16"} else dtype
    embedding = source.take("model.embed_tokens.weight", embedding_shape).to(stored)
    layers = [_load_layer(source, config, index, stored) for index in range(config.num_layers)]
    final_norm = source.take("model.norm.weight", (config.hidden_size,)).to(stored)
    head = embedding
    if not config.tie_word_embeddings:
        head = source.take("lm_head.weight", embedding_shape).to(stored)
    refuse_untaken(folder, source, config)
    return LlamaModel(
        config,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        num_positions=num_positions,
        dtype=dtype,
        compiled_rows=_compiled_rows(dtype, deterministic) if compiled else 0,
    )


def _compiled_rows(dtype: torch.dtype, deterministic: bool) -> int | None:
    """Return up to how many tokens a step runs compiled; None is any number.

    Many rows in bfloat16 belong to a CPU's matrix instructions, where it has them.
    """
    has_better = dtype == torch.bfloat16 and has_native_bfloat16()
    return _FEW_ROWS if has_better and not deterministic else None


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


def refuse_untaken(folder: Path, source: WeightSource, config: ModelConfig) -> None:
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

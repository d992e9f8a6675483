"""The Llama family: pre-norm decoder, rotary grouped-query attention, gated SiLU.

Also computes Mistral (without sliding window) and Qwen2 (bias on q, k, v). It sees one flattened
batch of tokens; which requests they belong to is the plan's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from worker.cpu.attention import AttentionPlan, PlainPlan, paged_attention, plain_plan
from worker.cpu.hadamard import HADAMARD_SIZE, hadamard
from worker.cpu.linear import Weight, linear
from worker.model.config import ModelConfig
from worker.model.lora import NO_ADAPTERS, BatchAdapters
from worker.model.rotary import apply_rotary, rotary_table

if TYPE_CHECKING:
    from worker.cpu.compiled.forward import CompiledForward
    from worker.model.calibration import Calibration


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights of one decoder layer, [out, in]; q, k, v and gate, up are fused."""

    input_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    out: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    down: Weight


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

    Steps of up to `compiled_rows` tokens run compiled, all if None; with a `calibration` they use
    the CPU's own products of bfloat16, which all weights must be stored in. `tap`, if set, is given
    the hidden states [tokens, hidden_size] of each step, before the last norm; none runs compiled
    then.
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
        calibration: Calibration | None = None,
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
        self._calibration = calibration
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
            calibration=self._calibration,
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
        if self._calibration is not None:  # As compiled steps write and read the cache.
            rotated = hadamard(rotated)
            rotated[:, :heads] /= HADAMARD_SIZE
            rotated[:, heads:] += self._calibration.key_offsets[index]
        cache.write(index, plan.slots, rotated[:, heads:], qkv[:, heads + kv_heads :])
        query = rotated[:, :heads]
        attended = paged_attention(query, cache.keys[index], cache.values[index], plan).flatten(1)
        return adapters.add(index, "out", attended, linear(attended, layer.out))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.rms_norm_eps)

"""A pre-norm decoder with rotary grouped-query attention, in plain torch operations.

It computes every native family and any rank's part of it: windows, norms of queries and keys,
Gemma's norms and scales, short convolutions, Mamba, mixtures of experts, tensor parallelism.
worker.model.llama is the short path for what is like Llama and whole. It sees one flattened batch
of tokens; which requests they belong to is the plan's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from worker.cpu.attention import AttentionPlan, PlainPlan, paged_attention, plain_plan
from worker.cpu.linear import linear
from worker.model.config import ModelConfig
from worker.model.kv_layout import KVLayout
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters
from worker.model.mamba import MambaPlan, MambaWeights, StateMemory, mamba_plan, mix
from worker.model.parallel import RankGroup
from worker.model.rotary import apply_rotary, rotary_table
from worker.model.short_conv import StatePlan, convolve, state_plan


@dataclass(slots=True, frozen=True)
class FeedForward:
    """A gated feed-forward; `gate_up` [2 * inner, hidden], `down` [hidden, inner]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True, frozen=True)
class Experts:
    """A mixture of feed-forwards; `router` [experts, hidden]. Every token goes through `shared`."""

    router: torch.Tensor
    members: list[FeedForward]
    shared: FeedForward | None = None


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """Weights of one layer, [out, in]; q, k, v are fused.

    `after_attention` and `after_mlp` norm what is added to the residual, where the family does;
    norms of queries and keys contain the attention's scale. Where there are `taps` [kernel,
    channels], a short convolution stands in place of attention, between the same two products, and
    where there is a `mamba`, a state-space mixer.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    after_attention: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: FeedForward | Experts
    after_mlp: torch.Tensor | None
    taps: torch.Tensor | None = None
    mamba: MambaWeights | None = None


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    """The tensors of one model, or of one rank's part; a tied `head` is the embedding itself."""

    embedding: torch.Tensor
    layers: list[DecoderLayer]
    final_norm: torch.Tensor
    head: torch.Tensor


class Decoder:
    """Weights and forward pass of one model, or of one rank's part; immutable once loaded.

    `config` is the shape of that part; `layout` says where each layer keeps its KV.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layout: KVLayout,
        weights: DecoderWeights,
        num_positions: int,
        ranks: RankGroup,
    ) -> None:
        self.config = config
        self._layout = layout
        self._embedding = embedding = weights.embedding
        # The scale is rounded as the embedding is: transformers multiplies in that precision.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype)
        # Where queries are normed, the norm's weight contains it.
        self._query_factor = 1.0
        if config.query_scale is not None and not config.qk_norm:
            self._query_factor = math.sqrt(config.head_dim / config.query_scale)
        self._layers = weights.layers
        self._final_norm = weights.final_norm
        self._head = weights.head
        self._ranks = ranks
        self._rotary = rotary_table(
            config.rope, head_dim=config.head_dim, num_positions=num_positions
        )
        self._local_rotary = self._rotary
        if config.local_rope is not None:
            self._local_rotary = rotary_table(
                config.local_rope, head_dim=config.head_dim, num_positions=num_positions
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
        adapters: BatchAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute a flattened batch; write its KV; return float32 logits of `rows` alone.

        token_ids, positions [tokens] int64; rows [sampled] int64; result [sampled, vocab_size].
        `adapters` say which tokens run with which LoRA adapter.
        """
        hidden = F.embedding(token_ids, self._embedding) * self._embedding_scale
        rotations = [table[:, positions, None, :] for table in (self._rotary, self._local_rotary)]
        plans = self._plans(plan, tokens_per_block=cache.keys.shape[2])
        for index, layer in enumerate(self._layers):
            place = self._layout.places[index]
            group_plan = plans[place.group]
            normed = self._norm(hidden, layer.input_norm)
            if isinstance(group_plan, MambaPlan):
                attended = self._mamba(layer, normed, cache, place.row, group_plan)
            elif isinstance(group_plan, StatePlan):
                attended = self._short_conv(layer, normed, cache.keys[place.row], group_plan)
            else:
                attended = self._attention(
                    index,
                    normed,
                    rotation=rotations[self._layout.windows[place.group] is not None],
                    cache=cache,
                    plan=group_plan,
                    adapters=adapters,
                )
            hidden = self._added(hidden, self._ranks.sum(attended), layer.after_attention)
            mixed = self._mlp(index, self._norm(hidden, layer.mlp_norm), adapters)
            hidden = self._added(hidden, self._ranks.sum(mixed), layer.after_mlp)
        logits = linear(self._norm(hidden[rows], self._final_norm), self._head).float()
        joined = self._ranks.join_columns(logits, total=self.config.vocab_size)
        divisor = self.config.logits_divisor
        return joined if divisor == 1.0 else joined / divisor

    def _added(
        self, hidden: torch.Tensor, part: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to the residual, normed and scaled where the family does that."""
        scale, normed = self.config.residual_scale, self._norm(part, norm)
        return hidden + (normed if scale == 1.0 else normed * scale)

    def _plans(
        self, plan: AttentionPlan, *, tokens_per_block: int
    ) -> list[PlainPlan | StatePlan | MambaPlan]:
        """Lay out what each cache group reads and writes; blocks with keys may hold more tokens."""
        attention = replace(plan, block_size=tokens_per_block)
        return [
            self._state_plan(plan, group)
            if group in self._layout.states
            else plain_plan(attention, group=group, window=window)
            for group, window in enumerate(self._layout.windows)
        ]

    def _state_plan(self, plan: AttentionPlan, group: int) -> StatePlan | MambaPlan:
        if self.config.mamba is not None:
            return mamba_plan(plan, group=group, kernel=self.config.mamba.kernel)
        return state_plan(plan, group=group, kernel=self.config.conv_kernel or 0)

    def _mamba(
        self, layer: DecoderLayer, x: torch.Tensor, cache: KVCache, row: int, plan: MambaPlan
    ) -> torch.Tensor:
        config = self.config.mamba
        assert config is not None
        assert layer.mamba is not None
        memory = StateMemory(cache.keys[row], cache.values[row], config)
        eps = self.config.rms_norm_eps
        mixed = mix(linear(x, layer.qkv), layer.mamba, config, memory=memory, plan=plan, eps=eps)
        return linear(mixed, layer.out)

    @staticmethod
    def _short_conv(
        layer: DecoderLayer, x: torch.Tensor, memory: torch.Tensor, plan: StatePlan
    ) -> torch.Tensor:
        assert layer.taps is not None
        gate_in, gate_out, value = linear(x, layer.qkv).chunk(3, dim=-1)
        mixed = convolve(gate_in * value, layer.taps, memory.flatten(1), plan)
        return linear(gate_out * mixed, layer.out)

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        *,
        rotation: torch.Tensor,
        cache: KVCache,
        plan: PlainPlan,
        adapters: BatchAdapters,
    ) -> torch.Tensor:
        config, layer, row = self.config, self._layers[index], self._layout.places[index].row
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        qkv = adapters.add(index, "qkv", x, linear(x, layer.qkv, layer.qkv_bias))
        query, key, value = torch.split(qkv.view(len(x), -1, config.head_dim), sizes, dim=1)
        cos, sin = rotation
        query = apply_rotary(self._norm(query, layer.q_norm), cos, sin)
        if self._query_factor != 1.0:
            query = query * self._query_factor
        key = apply_rotary(self._norm(key, layer.k_norm), cos, sin)
        cache.write(row, plan.slots, key, value)
        attended = paged_attention(query, cache.keys[row], cache.values[row], plan).flatten(1)
        return adapters.add(index, "out", attended, linear(attended, layer.out))

    def _mlp(self, index: int, x: torch.Tensor, adapters: BatchAdapters) -> torch.Tensor:
        mlp = self._layers[index].mlp
        if isinstance(mlp, Experts):
            return self._mixture(x, mlp)
        gate_up = adapters.add(index, "gate_up", x, linear(x, mlp.gate_up))
        gated = self._gate(gate_up)
        return adapters.add(index, "down", gated, linear(gated, mlp.down))

    def _mixture(self, x: torch.Tensor, mlp: Experts) -> torch.Tensor:
        """Send each token through the experts that the router gives the most weight."""
        config = self.config.experts
        assert config is not None
        weights, chosen = (
            linear(x, mlp.router).float().softmax(dim=-1).topk(config.num_chosen, dim=-1)
        )
        if config.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            expert = mlp.members[number]
            part = linear(self._gate(linear(x[rows], expert.gate_up)), expert.down)
            mixed.index_add_(0, rows, part * weights[rows, place, None].to(x.dtype))
        if mlp.shared is None:
            return mixed
        return mixed + linear(self._gate(linear(x, mlp.shared.gate_up)), mlp.shared.down)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.config.activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Norm the last dimension in the weight's precision; without a weight, leave it."""
        if weight is None:
            return x
        eps = self.config.rms_norm_eps
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

"""A decoder on a GPU, cut at its attentions: pieces over buffers that stay where they are.

Between two attentions nothing depends on how many requests there are or how long they are, so a
piece can be a CUDA graph of its own, and all of it together another. It computes what is like
Llama or Qwen: no windows, no mixtures, no ranks. The arithmetic is worker.model.decoder's, with
fewer roundings. It knows neither graphs nor requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kvindex.foundation.errors import ConfigError
from worker.gpu.dispatcher import Dispatch
from worker.gpu.step_buffers import StepInputs
from worker.kernels.decode_attention import choose_num_splits, decode_attention
from worker.kernels.prefill_attention import prefill_attention
from worker.kernels.rms_norm import add_rms_norm, rms_norm
from worker.kernels.rotary import rotate
from worker.kernels.silu_and_mul import silu_and_mul
from worker.kernels.store_kv import store_kv
from worker.model.config import ModelConfig
from worker.model.decoder import DecoderLayer, DecoderWeights, FeedForward
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters, Projection
from worker.model.rotary import rotary_table


@dataclass(slots=True, frozen=True)
class Workspace:
    """What pieces and attentions hand to each other; rows are tokens."""

    residual: torch.Tensor  # [tokens, hidden]
    qkv: torch.Tensor  # [tokens, heads + 2 * kv_heads, head_dim]
    attended: torch.Tensor  # [tokens, heads, head_dim]
    hidden: torch.Tensor  # [tokens, hidden], after the final norm


class GpuDecoder:
    """Weights on the device, and the pieces of a forward pass of up to `max_tokens` tokens.

    `cache` may be replaced while no graph exists. Piece 0 embeds and prepares the first attention,
    piece i follows the attention of layer i - 1, the last ends with the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        max_tokens: int,
        num_positions: int,
        num_processors: int,
        device: torch.device,
    ) -> None:
        check_supported(config)
        self.config = config
        self.cache: KVCache | None = None
        self._adapters: BatchAdapters = NO_ADAPTERS
        self._embedding = weights.embedding.to(device)
        tied = weights.head is weights.embedding
        self._head = self._embedding if tied else weights.head.to(device)
        self._final_norm = weights.final_norm.to(device)
        self._layers = [_on_device(layer, device) for layer in weights.layers]
        self._rotary = rotary_table(
            config.rope, head_dim=config.head_dim, num_positions=num_positions
        ).to(device)
        self._num_positions = num_positions
        self._num_processors = num_processors
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self._work = Workspace(
            residual=self._empty(max_tokens, config.hidden_size),
            qkv=self._empty(max_tokens, heads + 2 * kv_heads, size),
            attended=self._empty(max_tokens, heads, size),
            hidden=self._empty(max_tokens, config.hidden_size),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The precision of weights and activations."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._embedding.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every pass reads: projections and head, not norms."""
        weights = [self._head]
        for layer in self._layers:
            assert isinstance(layer.mlp, FeedForward)
            weights += [layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down]
        return sum(weight.numel() * weight.itemsize for weight in weights)

    @contextmanager
    def adapted(self, adapters: BatchAdapters) -> Iterator[None]:
        """Run passes with adapters, whose weights and rows are on the device."""
        self._adapters = adapters
        try:
            yield
        finally:
            self._adapters = NO_ADAPTERS

    @property
    def num_pieces(self) -> int:
        """One more than there are attentions."""
        return len(self._layers) + 1

    def piece(self, index: int, _: Dispatch, inputs: StepInputs) -> None:
        """Compute one piece; its results are in the workspace."""
        n = inputs.num_tokens
        residual = self._work.residual[:n]
        if index == 0:
            torch.index_select(self._embedding, 0, inputs.token_ids, out=residual)
            self._prepare_attention(
                0, rms_norm(residual, self._layers[0].input_norm, self._eps), inputs
            )
            return
        layer = self._layers[index - 1]
        assert isinstance(layer.mlp, FeedForward)
        attended = self._work.attended[:n].flatten(1)
        x = self._linear(index - 1, "out", attended, layer.out)
        x = add_rms_norm(x, residual, layer.mlp_norm, self._eps)
        gated = silu_and_mul(self._linear(index - 1, "gate_up", x, layer.mlp.gate_up))
        x = self._linear(index - 1, "down", gated, layer.mlp.down)
        if index == len(self._layers):
            self._work.hidden[:n] = add_rms_norm(x, residual, self._final_norm, self._eps)
        else:
            x = add_rms_norm(x, residual, self._layers[index].input_norm, self._eps)
            self._prepare_attention(index, x, inputs)

    def attend(self, index: int, inputs: StepInputs) -> None:
        """Compute the attention of one layer from `qkv` to `attended`."""
        assert self.cache is not None
        work, n = self._work, inputs.num_tokens
        query = work.qkv[:n, : self.config.num_heads]
        keys, values = self.cache.keys[index], self.cache.values[index]
        if inputs.tokens_per_request is None:
            prefill_attention(
                query,
                keys,
                values,
                block_tables=inputs.block_tables,
                query_start=inputs.query_start,
                context_lens=inputs.context_lens,
                out=work.attended[:n],
            )
            return
        # Only what is captured whole is padded to whole requests.
        n = len(inputs.context_lens) * inputs.tokens_per_request
        decode_attention(
            query[:n],
            keys,
            values,
            block_tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            num_splits=self.num_splits(len(inputs.context_lens)),
            out=work.attended[:n],
        )

    def num_splits(self, num_requests: int) -> int:
        """Return into how many parts contexts are split when so many requests decode."""
        return choose_num_splits(
            num_requests=num_requests,
            num_kv_heads=self.config.num_kv_heads,
            max_context=self._num_positions,
            num_processors=self._num_processors,
        )

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocab_size] of rows of the last pass, in the model's precision.

        rows [rows], of any integer type, on the device.
        """
        return F.linear(self._work.hidden.index_select(0, rows), self._head)

    def _prepare_attention(self, index: int, x: torch.Tensor, inputs: StepInputs) -> None:
        """Project, rotate, and write keys and values to the cache."""
        assert self.cache is not None
        config, layer, n = self.config, self._layers[index], inputs.num_tokens
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self._work.qkv[:n]
        flat = qkv.flatten(1)
        if layer.qkv_bias is None:
            torch.mm(x, layer.qkv.t(), out=flat)
        else:
            torch.addmm(layer.qkv_bias, x, layer.qkv.t(), out=flat)
        self._adapters.add(index, "qkv", x, flat)
        for part, norm in ((qkv[:, :heads], layer.q_norm), (qkv[:, heads:-kv_heads], layer.k_norm)):
            if norm is not None:
                part.copy_(F.rms_norm(part, norm.shape, norm, self._eps))
        rotate(qkv, inputs.positions, self._rotary, num_rotated=heads + kv_heads)
        store_kv(
            qkv[:, heads : heads + kv_heads],
            qkv[:, heads + kv_heads :],
            self.cache.keys[index],
            self.cache.values[index],
            inputs.slots,
        )

    def _linear(
        self,
        index: int,
        projection: Projection,
        x: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Project x, with what adapters add; graphs are captured and replayed without any."""
        return self._adapters.add(index, projection, x, F.linear(x, weight))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps


def check_supported(config: ModelConfig) -> None:
    """Raise ConfigError for a model that only the CPU path computes."""
    plain = (
        config.is_native
        and not any(config.windows)
        and config.experts is None
        and not config.gemma_norms
        and config.activation == "silu"
        and not config.is_scaled
    )
    if not plain:
        raise ConfigError(
            f"{config.architecture} does not run on a GPU yet (it is not native, or has sliding "
            "windows, layers with a state, experts, scales or norms of its own); set "
            "worker.device to cpu"
        )


def _on_device(layer: DecoderLayer, device: torch.device) -> DecoderLayer:
    def move(weight: torch.Tensor | None) -> torch.Tensor | None:
        return None if weight is None else weight.to(device)

    assert isinstance(layer.mlp, FeedForward)
    mlp = FeedForward(layer.mlp.gate_up.to(device), layer.mlp.down.to(device))
    return DecoderLayer(
        input_norm=layer.input_norm.to(device),
        qkv=layer.qkv.to(device),
        qkv_bias=move(layer.qkv_bias),
        q_norm=move(layer.q_norm),
        k_norm=move(layer.k_norm),
        out=layer.out.to(device),
        after_attention=None,
        mlp_norm=layer.mlp_norm.to(device),
        mlp=mlp,
        after_mlp=None,
    )

"""Any causal language model of transformers, by its own modules with our paged attention inside.

The way of last resort for families that nobody has written down here: slower, and on one rank. A
model is only served after a comparison with its own attention. It knows no architecture.
"""

from __future__ import annotations

import inspect
import logging
import math
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvindex.foundation.errors import ConfigError
from worker.cpu.attention import AttentionPlan, PlainPlan, paged_attention, plain_plans
from worker.model.config import ModelConfig
from worker.model.kv_layout import KVLayout, kv_layout
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters

_log = logging.getLogger("prefixfleet.worker.model")
_ATTENTION = "prefixfleet_paged"
_CHECK_CHUNKS = (5, 1, 4)
_CHECK_BLOCK_SIZE = 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of the largest logit: what two ways to compute the same attention may differ by."""


class _ForeignAttentionError(Exception):
    """Raised in a forward pass when a module asks for an attention that is not ours."""


@dataclass(slots=True, frozen=True)
class _Step:
    """What the attention modules of the running forward pass read and write."""

    cache: KVCache
    layout: KVLayout
    plans: list[PlainPlan]
    seen: set[int]


_running: ContextVar[_Step] = ContextVar("step")


class TransformersModel:
    """A module of transformers as a CausalLM; `module` uses the attention registered here."""

    def __init__(self, module: Any, config: ModelConfig) -> None:
        self.config = config
        self._module = module
        self._layout = kv_layout(config.num_layers, config.windows)
        parameters = inspect.signature(module.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters

    @property
    def dtype(self) -> torch.dtype:
        """The precision of weights and activations."""
        dtype: torch.dtype = self._module.dtype
        return dtype

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
        """Compute a flattened batch; see CausalLM. The whole batch is one sequence to the module.

        Adapters have no place in foreign modules, so none may be given.
        """
        assert not adapters.groups, "adapters on a model that transformers computes"
        plans = plain_plans(plan, self._layout.windows)
        step = _Step(cache, self._layout, plans, set())
        token = _running.set(step)
        picks = {"logits_to_keep": rows} if self._picks_rows else {}
        try:
            logits: torch.Tensor = self._module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **picks
            ).logits[0]
        finally:
            _running.reset(token)
        if len(step.seen) != self.config.num_layers:
            raise _ForeignAttentionError(f"{len(step.seen)} layers use the attention interface")
        return (logits if self._picks_rows else logits[rows]).float()


def load_transformers_model(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype
) -> TransformersModel:
    """Load a folder with transformers; ConfigError when it cannot be served that way."""
    import transformers

    transformers.AttentionInterface.register(_ATTENTION, _attend)
    transformers.AttentionMaskInterface.register(_ATTENTION, _no_mask)
    _log.warning("%s runs through transformers: no fast path here", config.architecture)
    try:
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it: {error}") from error
    _check(module.eval(), config)
    return TransformersModel(module, config)


@torch.inference_mode()
def _check(module: Any, config: ModelConfig) -> None:
    """Compare a few tokens, in chunks, with the module's own attention; then leave ours set.

    ConfigError when they differ, or when the module does not use the attention interface.
    """
    count = sum(_CHECK_CHUNKS)
    token_ids = torch.arange(count) % config.vocab_size
    expected = module(input_ids=token_ids[None], use_cache=False).logits[0].float()
    module.set_attn_implementation(_ATTENTION)
    model = TransformersModel(module, config)
    try:
        found = _chunked(model, token_ids)
    except (_ForeignAttentionError, RuntimeError) as error:
        raise ConfigError(
            f"{config.architecture} cannot be served through transformers: {error}"
        ) from error
    error_size = float((found - expected).abs().max() / expected.abs().max())
    if not error_size <= _TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{config.architecture} cannot be served through transformers: with paged attention "
            f"its logits differ by {error_size:.1%}"
        )


def _chunked(model: TransformersModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return all logits of a sequence that is computed in chunks over a small cache."""
    config, layout = model.config, kv_layout(model.config.num_layers, model.config.windows)
    num_blocks = -(-len(token_ids) // _CHECK_BLOCK_SIZE)
    shape = (
        layout.num_rows,
        1 + num_blocks * len(layout.windows),
        _CHECK_BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
    )
    cache = KVCache(*(torch.zeros(shape, dtype=model.dtype) for _ in range(2)))
    blocks = np.arange(1, shape[1], dtype=np.int32)
    first, *more = blocks.reshape(len(layout.windows), 1, num_blocks)
    logits, start = [], 0
    for size in _CHECK_CHUNKS:
        logits.append(
            model.forward(
                token_ids[start : start + size],
                torch.arange(start, start + size),
                cache=cache,
                plan=AttentionPlan(
                    np.array([size]), np.array([start]), first, _CHECK_BLOCK_SIZE, tuple(more)
                ),
                rows=torch.arange(size),
            )
        )
        start += size
    return torch.cat(logits)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for an attention function of transformers; [1, heads, tokens, head_dim] in."""
    step = _running.get()
    layer = module.layer_idx
    place = step.layout.places[layer]
    window = step.layout.windows[place.group]
    if sliding_window not in (None, window):
        raise _ForeignAttentionError(f"layer {layer} has the window {sliding_window}, not {window}")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if settings.get(name) is not None:
            raise _ForeignAttentionError(f"its attention asks for {name}")
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape[1:] != step.cache.keys.shape[-2:] or v.shape != k.shape:
        raise _ForeignAttentionError(
            f"layer {layer} has keys {tuple(k.shape[1:])} and values {tuple(v.shape[1:])}, its "
            f"config says {tuple(step.cache.keys.shape[-2:])}"
        )
    plan = step.plans[place.group]
    step.cache.write(place.row, plan.slots, k, v)
    step.seen.add(layer)
    keys, values = step.cache.keys[place.row], step.cache.values[place.row]
    return paged_attention((q * factor).contiguous(), keys, values, plan)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Stand in for a mask function: plans say what each query may read."""

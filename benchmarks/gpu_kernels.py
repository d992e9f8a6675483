"""Every kernel beside its reference on one device: the largest error, and on a GPU its speed.

Part of gpu_check. Shapes are those of real models on a GPU; on a CPU, where Triton interprets,
they are tiny. It knows the kernels and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.timing import Row, at_most
from worker.kernels import reference
from worker.kernels.decode_attention import choose_num_splits, decode_attention
from worker.kernels.prefill_attention import prefill_attention
from worker.kernels.rms_norm import add_rms_norm, rms_norm
from worker.kernels.rotary import rotate
from worker.kernels.sampling import Draws, sample_tokens
from worker.kernels.silu_and_mul import silu_and_mul
from worker.kernels.store_kv import store_kv
from worker.model.rope_config import RopeConfig
from worker.model.rotary import rotary_table
from worker.runner.sampler import uniform

_TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest value of the reference."""


@dataclass(slots=True, frozen=True)
class Scale:
    """How large the inputs are."""

    tokens: int
    requests: int
    context: int
    vocab_size: int


GPU = Scale(tokens=2048, requests=64, context=2048, vocab_size=128_256)
TINY = Scale(tokens=3, requests=2, context=20, vocab_size=5000)


@dataclass(slots=True, frozen=True)
class Shape:
    """The heads of a model."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


SHAPES = (Shape(9, 3, 64), Shape(32, 8, 128), Shape(8, 8, 64), Shape(4, 1, 256))


class KernelCheck:
    """Checks on one device in one precision; `action_us` times, and is None where it is no use."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        scale: Scale,
        *,
        num_processors: int,
        action_us: Callable[[Callable[[], object]], float] | None,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._scale = scale
        self._num_processors = num_processors
        self._action_us = action_us
        self._generator = torch.Generator(device).manual_seed(1)

    def rows(self, shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Row]:
        """Yield one row per kernel and shape for its error, and one for its time."""
        for width in (576, 4096):
            yield from self._elementwise(width)
        for shape in shapes:
            yield from self._rotary_and_store(shape)
            yield from self._attention(shape)
        if self._dtype == torch.float32:
            yield from self._sampling()

    def _elementwise(self, width: int) -> Iterator[Row]:
        x, weight = self._randn(self._scale.tokens, width), self._randn(width)
        size = x.numel() * x.itemsize
        name = f"rms_norm, width {width}"
        yield from self._compare(
            name, rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
        )
        yield from self._time(name, lambda: rms_norm(x, weight, 1e-5), 2 * size)
        ours, theirs = x.clone(), x.clone()
        name = f"add_rms_norm, width {width}"
        normed = add_rms_norm(x, ours, weight, 1e-5)
        yield from self._compare(name, normed, reference.add_rms_norm(x, theirs, weight, 1e-5))
        yield from self._compare(f"{name}, residual", ours, theirs)
        yield from self._time(name, lambda: add_rms_norm(x, ours, weight, 1e-5), 4 * size)
        gate_up = self._randn(self._scale.tokens, 2 * width)
        name = f"silu_and_mul, width {width}"
        yield from self._compare(name, silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
        yield from self._time(name, lambda: silu_and_mul(gate_up), 3 * size)

    def _rotary_and_store(self, shape: Shape) -> Iterator[Row]:
        tokens, rotated = self._scale.tokens, shape.heads + shape.kv_heads
        table = rotary_table(
            RopeConfig(theta=10_000.0), head_dim=shape.head_dim, num_positions=tokens
        ).to(self._device)
        positions = torch.arange(tokens, dtype=torch.int32, device=self._device)
        qkv = self._randn(tokens, rotated + shape.kv_heads, shape.head_dim)
        ours, theirs = qkv.clone(), qkv.clone()
        rotate(ours, positions, table, num_rotated=rotated)
        reference.rotate(theirs, positions, table, num_rotated=rotated)
        yield from self._compare(f"rotate, {shape}", ours, theirs)
        num_blocks = tokens // 16 + 2
        keys, values = (
            self._randn(num_blocks, 16, shape.kv_heads, shape.head_dim) for _ in range(2)
        )
        expected = keys.clone(), values.clone()
        slots = torch.randperm(tokens, device=self._device) + 8
        key, value = ours[:, shape.heads : rotated], ours[:, rotated:]
        store_kv(key, value, keys, values, slots.int())
        reference.store_kv(key, value, expected[0], expected[1], slots)
        for part, mine, other in zip(("keys", "values"), (keys, values), expected, strict=True):
            yield at_most(
                f"store_kv, {shape}, {part}: cells that differ",
                float((mine != other).sum()),
                "",
                0.0,
            )

    def _attention(self, shape: Shape) -> Iterator[Row]:
        scale, generator = self._scale, np.random.default_rng(2)
        contexts = generator.integers(1, scale.context + 1, scale.requests)
        contexts[:2] = (scale.context, 16)
        prefill = np.minimum(generator.integers(1, scale.context + 1, scale.requests), contexts)
        for name, queries in (
            ("prefill_attention", prefill[:16]),
            ("decode_attention", np.ones_like(contexts)),
        ):
            yield from self._paged(name, shape, contexts[: len(queries)], queries)

    def _paged(
        self, name: str, shape: Shape, contexts: np.ndarray, queries: np.ndarray
    ) -> Iterator[Row]:
        paged = self._paged_inputs(shape, contexts, queries)
        start = paged.pop("query_start")
        expected = torch.zeros_like(paged["out"])
        reference.paged_attention(**{**paged, "out": expected}, query_start=start)
        if name == "prefill_attention":
            label = f"{name}, {shape}"
            yield from self._launch(
                label, lambda: prefill_attention(**paged, query_start=start), paged, expected
            )
            return
        chosen = choose_num_splits(
            num_requests=len(contexts),
            num_kv_heads=shape.kv_heads,
            max_context=self._scale.context,
            num_processors=self._num_processors,
        )
        read = 2 * int(contexts.sum()) * shape.kv_heads * shape.head_dim * self._dtype.itemsize
        for splits in sorted({1, chosen, 8}):

            def launch(num_splits: int = splits) -> None:
                decode_attention(**paged, num_splits=num_splits)

            yield from self._launch(
                f"{name}, {shape}, {splits} splits", launch, paged, expected, read
            )

    def _launch(
        self,
        name: str,
        launch: Callable[[], None],
        paged: dict[str, torch.Tensor],
        expected: torch.Tensor,
        num_bytes: int | None = None,
    ) -> Iterator[Row]:
        paged["out"].zero_()
        launch()
        yield from self._compare(name, paged["out"], expected)
        yield from self._time(name, launch, num_bytes)

    def _paged_inputs(
        self, shape: Shape, contexts: np.ndarray, queries: np.ndarray
    ) -> dict[str, torch.Tensor]:
        counts = -(-contexts // 16)
        order = np.random.default_rng(3).permutation(int(counts.sum())) + 1
        tables = np.zeros((len(contexts), int(counts.max())), np.int32)
        for i, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
            tables[i, :count] = order[end - count : end]
        num_tokens = int(queries.sum())
        cache_shape = (len(order) + 1, 16, shape.kv_heads, shape.head_dim)
        fused = self._randn(num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        start = np.concatenate(([0], np.cumsum(queries)))
        return {
            "query": fused[:, : shape.heads],
            "key_cache": self._randn(*cache_shape),
            "value_cache": self._randn(*cache_shape),
            "block_tables": torch.from_numpy(tables).to(self._device),
            "query_start": torch.from_numpy(start.astype(np.int32)).to(self._device),
            "context_lens": torch.from_numpy(contexts.astype(np.int32)).to(self._device),
            "out": torch.zeros_like(fused[:, : shape.heads]).contiguous(),
        }

    def _sampling(self) -> Iterator[Row]:
        rows, vocab = self._scale.requests, self._scale.vocab_size
        logits = self._randn(rows, vocab) * 2
        seeds, choices = np.arange(rows).astype(np.uint64), np.zeros(rows, np.uint64)
        positions = np.arange(rows) * 7
        temperature = torch.arange(rows, device=self._device) % 3 * 0.6
        draws = Draws(
            temperature,
            *(
                torch.from_numpy(numbers.view(np.int64)).to(self._device)
                for numbers in (seeds, choices, positions)
            ),
        )
        out = torch.empty(rows, dtype=torch.int64, device=self._device)
        sample_tokens(logits, draws, out)
        numbers = torch.from_numpy(uniform(seeds, choices, positions)).to(self._device)
        upto = (logits.double() / temperature.clamp(min=1e-9)[:, None]).softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(upto, (numbers * upto[:, -1])[:, None], right=True).squeeze(-1)
        expected = torch.where(temperature > 0, drawn, logits.argmax(-1))
        name = f"sample_tokens, {rows} rows of {vocab}"
        yield at_most(f"{name}: tokens that differ", float((out != expected).sum()), "", 0.0)
        size = logits.numel() * logits.itemsize
        yield from self._time(name, lambda: sample_tokens(logits, draws, out), size)

    def _randn(self, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self._device)
        return made.to(self._dtype)

    def _compare(self, name: str, ours: torch.Tensor, expected: torch.Tensor) -> Iterator[Row]:
        scale = max(1.0, float(expected.float().abs().max()))
        error = float((ours.float() - expected.float()).abs().max()) / scale
        precision = str(self._dtype).removeprefix("torch.")
        yield at_most(f"{name}, {precision}: error", error, "", _TOLERANCE[self._dtype])

    def _time(
        self, name: str, action: Callable[[], object], num_bytes: int | None
    ) -> Iterator[Row]:
        if self._action_us is None or self._dtype != torch.bfloat16:
            return
        took = self._action_us(action)
        yield Row(name=f"{name}: time", ours=took, unit="us")
        if num_bytes is not None:
            yield Row(name=f"{name}: memory", ours=num_bytes / took / 1e3, unit="GB/s")

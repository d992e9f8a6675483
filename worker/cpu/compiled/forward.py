"""A decoder's forward pass through the compiled step: weights by address, buffers that are reused.

It computes what LlamaModel does, for models without adapters on one rank. Weights may be stored in
bfloat16, and those of layers in eight bits, whatever the precision of the model: widening them is
exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.cpu.attention import AttentionPlan
from worker.cpu.compiled.crew import Crew
from worker.cpu.compiled.entry import compiled_step, kernel_folder
from worker.cpu.compiled.sizes import (
    CHUNK,
    COUNTER_BYTES,
    FEW_TOKENS,
    FIRST_STAGES,
    LAST_STAGES,
    MOST_PARTS,
    PAIR_COLUMNS,
    PAIR_QUERY_ROWS,
    PAIR_ROWS,
    PANEL,
    QUERY_ROWS,
    STAGES_PER_LAYER,
    STREAMS,
    TILE_FLOATS,
)
from worker.cpu.compiled.step_record import LAYER, NORMED, PLACE, PRODUCTS, STEP
from worker.cpu.compiled.tile_library import tile_addresses
from worker.cpu.compiled.tiles import STORAGES
from worker.cpu.compiled.vector_code import LANES, MULTIPLIES_PAIRS, Storage
from worker.cpu.eight_bit import EightBitWeight
from worker.cpu.linear import Weight
from worker.model.config import ModelConfig
from worker.model.weight_memory import WeightMemory

if TYPE_CHECKING:
    from worker.model.calibration import Calibration

Int64Array = npt.NDArray[np.int64]

_STORAGE_OF: dict[torch.dtype, Storage] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
}


_OWN_REFERENCES = 2
"""To an array that an attribute and a call in progress know, and no one else."""

_LINE_FLOATS = 32
"""Of two lines of cache, which some processors fetch together."""


class LayerWeights(Protocol):
    """One layer, as worker.model.llama fuses it."""

    @property
    def input_norm(self) -> torch.Tensor: ...
    @property
    def qkv(self) -> Weight: ...
    @property
    def qkv_bias(self) -> torch.Tensor | None: ...
    @property
    def out(self) -> Weight: ...
    @property
    def post_norm(self) -> torch.Tensor: ...
    @property
    def gate_up(self) -> Weight: ...
    @property
    def down(self) -> Weight: ...


class Cache(Protocol):
    """Paged keys and values, each [layers, blocks, block_size, kv_heads, head_dim]."""

    @property
    def keys(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...


def can_compile(config: ModelConfig) -> bool:
    """Tell whether the compiled step covers a model of this shape on this CPU."""
    group = config.num_heads // config.num_kv_heads
    depths = (config.hidden_size, config.intermediate_size, config.head_dim)
    return group <= QUERY_ROWS and all(depth % LANES == 0 for depth in depths)


def can_pair(config: ModelConfig) -> bool:
    """Tell whether this CPU multiplies pairs of bfloat16, and a model's widths are whole panels."""
    depths = (config.hidden_size, config.intermediate_size, config.head_dim)
    is_whole = all(depth % (2 * LANES) == 0 for depth in depths)
    return MULTIPLIES_PAIRS and is_whole and config.vocab_size % LANES == 0


class CompiledForward:
    """Runs whole steps of one model. Keeps the tensors that it was given; changes none of them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: Sequence[LayerWeights],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        rotary: torch.Tensor,
        calibration: Calibration | None,
    ) -> None:
        """Multiply pairs of bfloat16 if there is a `calibration`."""
        self._config = config
        self._in_pairs = calibration is not None
        self._run = compiled_step()
        self._tiles = tile_addresses(kernel_folder())
        self._crew = Crew(torch.get_num_threads())
        self._kept: list[torch.Tensor] = []
        self._buffers: dict[str, npt.NDArray[np.generic]] = {}
        self._record = np.zeros(1, STEP)
        self._record["eps"][0] = config.rms_norm_eps
        self._fields = self._record.view(np.int64)
        self._cache_place: tuple[object, ...] = ()
        self._num_tokens = 0
        self._vocab_size = len(head)
        self._logits = np.empty((FEW_TOKENS, len(head)), np.float32)
        self._singles = _singles(FEW_TOKENS)
        nothing = torch.zeros(2 * len(layers) + 1, 0, dtype=torch.int64)
        fine_channels = nothing if calibration is None else calibration.fine_channels
        fine_gated = nothing[: len(layers)] if calibration is None else calibration.fine_gated
        self._num_fine, self._num_fine_gated = fine_channels.shape[1], fine_gated.shape[1]
        self._panels = self._room_for_panels(layers, head) if self._in_pairs else None
        fine = fine_channels[:-1].view(len(layers), 2, self._num_fine)
        rows = zip(layers, fine, fine_gated, strict=True)
        addresses = [self._addresses(*each) for each in rows]
        self._layers = np.array(addresses, np.int64)
        self._set(
            num_layers=len(layers),
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=len(head),
            ends_are_half=head.dtype == torch.bfloat16,
            in_pairs=self._in_pairs,
            fine_channels=self._address_of("fine_channels", fine_channels),
            num_fine=self._num_fine,
            num_fine_gated=self._num_fine_gated,
            key_offsets=self._address_of(
                "key_offsets", None if calibration is None else calibration.key_offsets
            ),
            storage=_storage_of(layers[0]),
            layers=self._layers.ctypes.data,
            embedding=self._address_of("embedding", embedding),
            final_norm=self._address_of("final_norm", final_norm),
            head=self._address_of("head", self._laid_out(head, fine_channels[-1])),
            rotary=self._address_of("rotary", rotary),
            num_positions=rotary.shape[1],
            num_parts=self._num_parts,
            tiles=self._tiles.ctypes.data,
            query_rows=self._query_rows,
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: Cache,
        plan: AttentionPlan,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Do what LlamaModel.forward does, with the same arguments and result."""
        self._crew.settle()
        num_tokens, num_rows = token_ids.shape[0], rows.shape[0]
        is_decode = num_tokens == len(plan.num_queries)
        tables = np.ascontiguousarray(plan.block_tables, np.int32)
        segments = self._segments(plan.num_queries, is_decode=is_decode)
        requests = np.repeat(np.arange(len(plan.num_queries)), plan.num_queries)
        logits = self._room_for_logits(num_rows)
        self._set_cache(cache, plan.block_size)
        if max(num_tokens, num_rows) > self._num_tokens:
            self._set_buffers(max(num_tokens, num_rows))
        self._set(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_segments=len(segments),
            is_decode=is_decode,
            table_width=tables.shape[1],
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            requests=requests.ctypes.data,
            tables=tables.ctypes.data,
            segments=segments.ctypes.data,
            rows=rows.data_ptr(),
            logits=logits.data_ptr(),
            counters=self._counters(),
        )
        # A helper on its way out still reads weights and rows.
        kept = (self._record, self._buffers, self._layers, self._tiles, self._kept, rows)
        self._crew.run(self._run, self._record.ctypes.data, keeps=kept)
        return logits

    @property
    def _num_parts(self) -> int:
        return min(self._crew.size, MOST_PARTS)

    @property
    def _query_rows(self) -> int:
        return PAIR_QUERY_ROWS if self._in_pairs else QUERY_ROWS

    @property
    def _group(self) -> int:
        return self._config.num_heads // self._config.num_kv_heads

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._fields[PLACE[name]] = value

    def _segments(self, num_queries: Int64Array, *, is_decode: bool) -> Int64Array:
        if not is_decode:
            return segments_of(num_queries, max(1, self._query_rows // self._group))
        if len(num_queries) > len(self._singles):
            self._singles = _singles(len(num_queries))
        return self._singles[: len(num_queries)]

    def _room_for_logits(self, num_rows: int) -> torch.Tensor:
        """Return room for [num_rows, vocab_size]: of few rows, the last one if nobody reads it now.

        Fresh memory costs a page fault for each page, and giving it back costs as much again.
        """
        is_free = sys.getrefcount(self._logits) == _OWN_REFERENCES
        if num_rows > len(self._logits):
            return torch.empty(num_rows, self._vocab_size)
        if not is_free:
            self._logits = np.empty_like(self._logits)
        return torch.from_numpy(self._logits[:num_rows])

    def _set_cache(self, cache: Cache, block_size: int) -> None:
        keys = cache.keys
        place = keys.data_ptr(), cache.values.data_ptr(), keys.dtype, keys.shape, block_size
        if place == self._cache_place:
            return
        self._cache_place = place
        self._num_tokens = 0  # Buffers depend on the size of blocks.
        assert not self._in_pairs or keys.dtype == torch.bfloat16, "pairs are of bfloat16"
        assert keys.is_contiguous()
        assert cache.values.is_contiguous()
        self._set(
            keys=keys.data_ptr(),
            values=cache.values.data_ptr(),
            layer_bytes=keys.stride(0) * keys.itemsize,
            block_size=block_size,
            cache_is_half=keys.dtype == torch.bfloat16,
            chunk=self._chunk(block_size),
        )

    def _chunk(self, block_size: int) -> int:
        """Return a width of scores that is whole blocks and whole vectors."""
        width = max(CHUNK // block_size, 1) * block_size
        while width % LANES:
            width += block_size
        return width

    def _set_buffers(self, num_tokens: int) -> None:
        """Make room for steps of so many tokens, or fewer."""
        self._num_tokens = num_tokens
        config = self._config
        inner, head_dim = config.intermediate_size, config.head_dim
        attended = config.num_heads * head_dim
        chunk = int(self._record["chunk"][0])
        scratch = TILE_FLOATS + PANEL * max(config.hidden_size, inner, attended)
        normed = config.hidden_size + self._num_fine
        scratch += FEW_TOKENS * normed
        rows = self._query_rows
        attention = rows * (2 * head_dim + chunk + 2) + TILE_FLOATS
        # What paged_pairs has besides, two to a float.
        attention += (rows * (head_dim + chunk) + 3 * chunk * head_dim) // 2
        # Gate and up of a unit. No line of cache belongs to two threads.
        height, width = (PAIR_ROWS, PAIR_COLUMNS) if self._in_pairs else (num_tokens, PANEL)
        beside = 2 * max(min(height, num_tokens) * width, FEW_TOKENS * STREAMS * LANES)
        scratch = _whole_lines(scratch + max(attention, beside)) + _LINE_FLOATS
        sizes = {
            "hidden": num_tokens * config.hidden_size,
            "normed": num_tokens * normed,
            "qkv": num_tokens * (attended + 2 * config.num_kv_heads * head_dim),
            "attended": num_tokens * attended,
            "gated": num_tokens * (inner + self._num_fine_gated),
            "scratch": scratch * self._crew.size,
        }
        self._set(
            scratch_floats=scratch,
            **{name: self._buffer(name, size) for name, size in sizes.items()},
        )

    def _counters(self) -> int:
        """Return the address of zeroed counters for every stage."""
        if "counters" not in self._buffers:
            stages = FIRST_STAGES + STAGES_PER_LAYER * self._config.num_layers + LAST_STAGES
            num_bytes = stages * (1 + self._num_parts) * COUNTER_BYTES
            self._buffers["counters"] = np.zeros(num_bytes // 8, np.int64)
        self._buffers["counters"].fill(0)
        return self._buffers["counters"].ctypes.data

    def _buffer(self, name: str, size: int) -> int:
        """Return the address of at least `size` floats, kept from step to step."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer.ctypes.data

    def _addresses(
        self, layer: LayerWeights, fine_channels: torch.Tensor, fine_gated: torch.Tensor
    ) -> list[int]:
        """Return a row of `layers`; fine_channels are those of its two norms.

        fine_gated are of what down multiplies. They come first in panels: whoever computes them
        knows them by their place.
        """
        fine = dict(zip(NORMED, fine_channels, strict=True))
        fine["down"] = torch.arange(len(fine_gated))
        tensors: dict[str, torch.Tensor | None] = {
            "input_norm": layer.input_norm,
            "post_norm": layer.post_norm,
            "qkv_bias": layer.qkv_bias,
        }
        for name in PRODUCTS:
            weight: Weight = getattr(layer, name)
            if isinstance(weight, EightBitWeight):
                tensors |= {name: weight.values, f"{name}_scales": weight.scales}
            else:
                if name == "gate_up":
                    halves = weight.view(2, -1, weight.shape[1])
                    weight = _reordered(halves, fine_gated).flatten(0, 1)
                elif name == "down":
                    weight = _reordered(weight, fine_gated)
                tensors |= {name: self._laid_out(weight, fine.get(name)), f"{name}_scales": None}
        return [self._address_of(name, tensors[name]) for name in LAYER]

    def _room_for_panels(self, layers: Sequence[LayerWeights], head: torch.Tensor) -> WeightMemory:
        sizes = [len(head) * (head.shape[1] + self._num_fine) * head.itemsize]
        behind = {**dict.fromkeys(NORMED, self._num_fine), "down": self._num_fine_gated}
        for layer in layers:
            for name in PRODUCTS:
                weight = getattr(layer, name)
                depth = weight.shape[1] + behind.get(name, 0)
                sizes.append(len(weight) * depth * weight.itemsize)
        return WeightMemory(sum(sizes), num_tensors=len(sizes))

    def _laid_out(self, weight: torch.Tensor, fine: torch.Tensor | None) -> torch.Tensor:
        """Return a weight as products read it, some channels once more at the end of its depth."""
        if self._panels is None:
            return weight
        if fine is not None:
            weight = torch.cat((weight, weight[:, fine]), dim=1)
        return self._panels.place(panels_of(weight))

    def _address_of(self, name: str, tensor: torch.Tensor | None) -> int:
        """Return where a tensor lies, made contiguous; what is added or scaled by in float32."""
        if tensor is None:
            return 0
        if name.endswith(("norm", "bias", "scales")):
            tensor = tensor.float()
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [columns, depth] in panels [columns / LANES, depth / 2, LANES, 2]."""
    columns, depth = weight.shape
    return weight.view(columns // LANES, LANES, depth // 2, 2).transpose(1, 2)


def _reordered(weight: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return a weight with some places of its second dimension before the others."""
    if not len(first):
        return weight
    others = torch.ones(weight.shape[1], dtype=torch.bool)
    others[first] = False
    return weight[:, torch.cat((first, others.nonzero().flatten()))]


def _singles(count: int) -> Int64Array:
    """Return the segments of as many requests with a token each."""
    return segments_of(np.ones(count, np.int64), 1)


def _whole_lines(floats: int) -> int:
    return -(-floats // _LINE_FLOATS) * _LINE_FLOATS


def _storage_of(layer: LayerWeights) -> int:
    """Return how the products of a layer, and of all others, are stored."""
    stored = layer.qkv.values if isinstance(layer.qkv, EightBitWeight) else layer.qkv
    return STORAGES.index(_STORAGE_OF[stored.dtype])


def segments_of(num_queries: Int64Array, longest: int) -> Int64Array:
    """Cut the tokens of each request into runs of at most `longest`; [segments, 2] first, count."""
    starts = np.cumsum(num_queries) - num_queries
    counts = -(-num_queries // longest)
    request = np.repeat(np.arange(len(num_queries)), counts)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[request] + nth * longest
    length = np.minimum(longest, starts[request] + num_queries[request] - first)
    return np.ascontiguousarray(np.stack((first, length), axis=1))

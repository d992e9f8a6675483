"""Decides for every step whether it runs in a CUDA graph, in which one, and how far it is padded.

The single source of truth: runners and graphs obey it blindly, so what was captured and what is
replayed cannot differ. It knows sizes and keys; it has never heard of torch or of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

CudaGraphMode = Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


class GraphMode(Enum):
    """What of a step is replayed: nothing, all but attention, or all of it."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


_MODES: dict[CudaGraphMode, tuple[GraphMode, GraphMode]] = {
    "none": (GraphMode.NONE, GraphMode.NONE),
    "piecewise": (GraphMode.PIECEWISE, GraphMode.PIECEWISE),
    "full": (GraphMode.FULL, GraphMode.FULL),
    "full_decode_only": (GraphMode.FULL, GraphMode.NONE),
    "full_and_piecewise": (GraphMode.FULL, GraphMode.PIECEWISE),
}
"""Setting -> mode of uniform decode steps, mode of all others (as vLLM names them)."""


@dataclass(slots=True, frozen=True)
class GraphKey:
    """One graph. `num_requests` None: it holds no attention, so it fits any number of them.

    `is_uniform`: every request has as many tokens as a decode with its drafts.
    """

    mode: GraphMode
    num_tokens: int
    num_requests: int | None
    is_uniform: bool


@dataclass(slots=True, frozen=True)
class Dispatch:
    """How a step runs: padded to `num_tokens` and `num_requests`, as `key` says; None is eager."""

    key: GraphKey | None
    num_tokens: int
    num_requests: int

    @property
    def mode(self) -> GraphMode:
        """What is replayed."""
        return GraphMode.NONE if self.key is None else self.key.mode


def capture_sizes(
    *, max_num_seqs: int, max_num_batched_tokens: int, tokens_per_decode: int = 1, limit: int = 512
) -> list[int]:
    """Return the padded numbers of tokens that graphs exist for, ascending.

    1, 2, 4, then steps of 8 up to 256 and of 16 beyond (as in vLLM), up to twice the largest
    decode step or `limit`; with drafts also whole requests of `tokens_per_decode` tokens.
    """
    largest_decode = max_num_seqs * tokens_per_decode
    largest = min(2 * largest_decode, limit, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)}
    if tokens_per_decode > 1:
        sizes |= {size - size % tokens_per_decode + tokens_per_decode for size in sizes}
    return sorted(size for size in sizes if size <= largest)


class GraphDispatcher:
    """Which graphs there are to capture, which are captured, and which one a step takes.

    A step takes a graph only once it is captured, so traffic is served eagerly until then.
    `num_padding_tokens` counts the tokens that steps were padded with.
    """

    def __init__(
        self,
        mode: CudaGraphMode,
        sizes: Sequence[int],
        *,
        max_num_seqs: int,
        tokens_per_decode: int = 1,
    ) -> None:
        self._decode_mode, self._mixed_mode = _MODES[mode]
        self._max_num_seqs = max_num_seqs
        self._tokens_per_decode = tokens_per_decode
        self._padded = _padding_table(sizes)
        self._padded_uniform = _padding_table(
            [
                size
                for size in sizes
                if size % tokens_per_decode == 0 and size // tokens_per_decode <= max_num_seqs
            ]
        )
        self._keys = self._wanted_keys()
        self._captured: set[GraphKey] = set()
        self._missed: dict[GraphKey, int] = {}
        self.num_padding_tokens = 0

    @property
    def tokens_per_decode(self) -> int:
        """Tokens of a request in a uniform decode step: the last one and the drafts behind it."""
        return self._tokens_per_decode

    def all_keys(self) -> list[GraphKey]:
        """List every graph there is to capture, in the order in which it is best done.

        Piecewise before full and, so that smaller ones reuse its memory, the largest first.
        """
        return list(self._keys)

    def dispatch(self, *, num_tokens: int, num_requests: int, is_uniform: bool) -> Dispatch:
        """Choose for one step: the full graph of exactly its kind, else piecewise, else none."""
        for key in self._candidates(num_tokens, is_uniform):
            if key in self._captured:
                self.num_padding_tokens += key.num_tokens - num_tokens
                return self.dispatch_of(key, num_requests)
            self._missed[key] = self._missed.get(key, 0) + 1
        return Dispatch(None, num_tokens, num_requests)

    def dispatch_of(self, key: GraphKey, num_requests: int) -> Dispatch:
        """Return how a step of `num_requests` runs in a graph; also used to capture it."""
        return Dispatch(key, key.num_tokens, key.num_requests or num_requests)

    def mark_captured(self, key: GraphKey) -> None:
        """Let steps take a graph from now on."""
        self._captured.add(key)
        self._missed.pop(key, None)

    def next_to_capture(self, *, min_misses: int = 1) -> GraphKey | None:
        """Return the graph that was missed most, at least `min_misses` times; 0 means any."""
        open_keys = [key for key in self._keys if key not in self._captured]
        best = max(open_keys, key=lambda key: self._missed.get(key, 0), default=None)
        if best is None or self._missed.get(best, 0) < min_misses:
            return None
        return best

    def _wanted_keys(self) -> list[GraphKey]:
        mixed = map(self._mixed_key, sorted(set(self._padded), reverse=True))
        uniform = map(self._uniform_key, sorted(set(self._padded_uniform), reverse=True))
        wanted = [key for key in dict.fromkeys((*mixed, *uniform)) if key is not None]
        return sorted(wanted, key=lambda key: key.mode is GraphMode.FULL)

    def _candidates(self, num_tokens: int, is_uniform: bool) -> list[GraphKey]:
        """List the graphs that could run a step, the best first."""
        found = []
        if is_uniform and num_tokens < len(self._padded_uniform):
            found.append(self._uniform_key(self._padded_uniform[num_tokens]))
        if num_tokens < len(self._padded):
            found.append(self._mixed_key(self._padded[num_tokens]))
        return [key for key in dict.fromkeys(found) if key is not None]

    def _uniform_key(self, size: int) -> GraphKey | None:
        if self._decode_mode is not GraphMode.FULL:
            return self._mixed_key(size)
        return GraphKey(GraphMode.FULL, size, size // self._tokens_per_decode, is_uniform=True)

    def _mixed_key(self, size: int) -> GraphKey | None:
        if self._mixed_mode is GraphMode.FULL:
            return GraphKey(GraphMode.FULL, size, min(size, self._max_num_seqs), is_uniform=False)
        if self._mixed_mode is GraphMode.PIECEWISE:
            return GraphKey(GraphMode.PIECEWISE, size, None, is_uniform=False)
        return None


def _padding_table(sizes: Sequence[int]) -> list[int]:
    """Return the smallest size of at least n tokens at index n, for n up to the largest size."""
    table: list[int] = []
    for size in sorted(sizes):
        table += [size] * (size + 1 - len(table))
    return table

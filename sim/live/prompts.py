"""Prompts for a trace that has none: token ids that agree exactly where the trace's blocks do.

Each block id gives a block of token ids by a keyed hash, whatever the process. Nobody is meant to
read them, and it knows neither requests nor fleets.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from sim.traces.row import TraceHeader, TraceRow

DEFAULT_VOCAB_SIZE = 256
"""So many ids are valid in any vocabulary; a block of 16 still has 128 bits to differ in."""

_BYTES_PER_TOKEN = 4
_CACHED_BLOCKS = 4096


class PromptMaker:
    """Makes prompts of token ids in [0, vocab_size); `seed` keeps two runs from sharing any."""

    def __init__(
        self, header: TraceHeader, *, vocab_size: int = DEFAULT_VOCAB_SIZE, seed: int = 0
    ) -> None:
        self._block_size = header.block_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._make_block)

    def prompt(self, row: TraceRow) -> list[int]:
        """Return the prompt of a row; what no id covers is the row's own, by its line."""
        length = max(1, row.input_length)
        token_ids: list[int] = []
        if self._block_size is not None:
            for block_id in row.hash_ids or ():
                token_ids += self._block(block_id)
        del token_ids[length:]
        missing = length - len(token_ids)
        if missing:
            token_ids += self._tokens(f"line {row.line} {row.request_id}", missing)
        return token_ids

    def _make_block(self, block_id: int) -> tuple[int, ...]:
        assert self._block_size is not None, "a trace with ids has a block size"
        return tuple(self._tokens(f"block {block_id}", self._block_size))

    def _tokens(self, name: str, count: int) -> list[int]:
        key = f"{self._seed}".encode()
        stream = hashlib.shake_128(key + b" " + name.encode()).digest(count * _BYTES_PER_TOKEN)
        return [
            int.from_bytes(stream[i : i + _BYTES_PER_TOKEN], "big") % self._vocab_size
            for i in range(0, len(stream), _BYTES_PER_TOKEN)
        ]

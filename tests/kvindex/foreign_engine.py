"""A foreign engine reduced to its event stream: vLLM's hashes, events and copies, no boots.

It hashes with pickled SHA-256 in blocks of its own size, publishes the last 8 bytes as integers,
announces every copy, and tells token ids and extra keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.events import BlockRemoved, BlockStored, EventBatch, WireHash
from kvindex.hashing import Adapter, HashScheme, hash_tokens, short_hash
from tests.contracts.index_subject import BOOT_NS
from tests.kvindex.stream_engine import StreamEngine

BLOCK = 32


def tokens_of(length: int, first: int = 0) -> list[int]:
    """Return a prompt; prompts of different `first` share nothing."""
    return list(range(first, first + length))


class ForeignPrompt:
    """A prompt as the engine caches it: its tokens and the names of its blocks."""

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        block_size: int = BLOCK,
        salt: str | None = None,
        lora: str | None = None,
        as_bytes: bool = False,
    ) -> None:
        scheme = HashScheme(algorithm="sha256", seed="another", block_size=block_size)
        adapter = None if lora is None else Adapter(lora, f"/adapters/{lora}")
        digests = hash_tokens(tokens, scheme, cache_salt=salt, adapter=adapter)
        self.tokens, self.block_size, self.salt, self.lora = list(tokens), block_size, salt, lora
        self.names: list[WireHash] = [d if as_bytes else short_hash(d) for d in digests]

    def stored(self, first: int = 0, last: int | None = None, **fields: Any) -> BlockStored:
        """Return the event of blocks `first` to `last` (exclusive)."""
        last = len(self.names) if last is None else last
        keys = [key for key in (self.lora, self.salt) if key is not None]
        later = [self.lora] if self.lora is not None else None
        every = [(keys or None) if i == 0 else later for i in range(first, last)]
        given: dict[str, Any] = {
            "block_hashes": self.names[first:last],
            "parent_block_hash": self.names[first - 1] if first else None,
            "token_ids": self.tokens[first * self.block_size : last * self.block_size],
            "block_size": self.block_size,
            "lora_name": self.lora,
            "extra_keys": every,
            "group_idx": 0,
        }
        return BlockStored(**(given | fields))

    def removed(self, first: int = 0, last: int | None = None, **fields: Any) -> list[BlockRemoved]:
        """Return the events of evicting blocks, the last one first."""
        names = self.names[first:last]
        return [BlockRemoved(block_hashes=[name], **fields) for name in reversed(names)]


class ForeignEngine(StreamEngine):
    """Publishes under vLLM's topic; a restart keeps the topic and numbers from 0 again."""

    def __init__(self, *, max_replay: int = 1000) -> None:
        super().__init__(boot_ns=BOOT_NS, max_replay=max_replay)
        self.topic = "kv-events"
        self.num_said = 0

    async def say(self, *events: Any, rank: int | None = 0, delivered: bool = True) -> None:
        """Publish events as one batch."""
        self.num_said += 1
        # A time stamp never comes twice, not even after a restart.
        batch = EventBatch(float(self.num_said), list(events), rank)
        await self.publish(batch, delivered=delivered)

    def restart(self) -> None:
        """Start again, empty, on the same endpoints."""
        self._buffer, self.next_seq = [], 0

"""What the scripted executor keeps in KV blocks: one stand-in for a layer per cache group.

Each layer writes and reads its blocks only where a real layer of its kind would, and what it
writes depends on what it reads. It knows block tables, not who made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from engine.kv_groups.group import KVGroup
from engine.kv_groups.spec import CrossAttention
from kvindex.hit_rule import GroupRule

SLOT_BYTES = 8

Memory = list[bytearray]
"""Contents of every block, by block id; a layer uses the front of a block."""


class Digest(Protocol):
    """The part of a hashlib object that reading needs."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take in more contents."""
        ...


class ScriptedLayer(Protocol):
    """One cache group's contents; positions are token positions, tables hold block ids.

    `prompt_digest` stands for the whole prompt, where contents depend on it.
    """

    def enter(
        self, table: Sequence[int], tokens: Sequence[int], prompt_digest: bytes, end: int
    ) -> None:
        """Compute again what is never cached, for the first `end` tokens of a new request."""
        ...

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        """Compute the contents of tokens [start, end)."""
        ...

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        """Feed the digest with everything that the last of `num_tokens` tokens reads."""
        ...


def make_layer(group: KVGroup, memory: Memory) -> ScriptedLayer:
    """Build the stand-in for a group's layers."""
    if isinstance(group.spec, CrossAttention):
        return _EncoderLayer(memory, group.block_size, group.spec.num_tokens)
    if group.rule is None:
        return _NonCausalLayer(memory, group.block_size)
    if group.rule.kind == "state":
        return _StateLayer(memory, group.block_size)
    if group.rule.kind == "full":
        return _FullLayer(memory, group.block_size)
    return _LocalLayer(memory, group.rule)


class _Slots:
    """One slot per token, addressed through a block table."""

    def __init__(self, memory: Memory, block_size: int) -> None:
        self._memory = memory
        self._block_size = block_size

    def enter(
        self, table: Sequence[int], tokens: Sequence[int], prompt_digest: bytes, end: int
    ) -> None:
        """Nothing: what is cached is not computed again."""

    def _slot(self, table: Sequence[int], position: int) -> memoryview:
        block_id = table[position // self._block_size]
        assert block_id, f"position {position} is read or written through the null block"
        offset = position % self._block_size * SLOT_BYTES
        return memoryview(self._memory[block_id])[offset : offset + SLOT_BYTES]

    def _spans(self, table: Sequence[int], start: int, end: int) -> Iterator[memoryview]:
        """Yield the contents of positions [start, end), one piece per block."""
        while start < end:
            stop = min(end, (start // self._block_size + 1) * self._block_size)
            block_id = table[start // self._block_size]
            assert block_id, f"position {start} is read through the null block"
            first = start % self._block_size * SLOT_BYTES
            last = first + (stop - start) * SLOT_BYTES
            yield memoryview(self._memory[block_id])[first:last]
            start = stop


class _FullLayer(_Slots):
    """A slot depends on the one before it, a sample on all."""

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        size, memory, blake2b = self._block_size, self._memory, hashlib.blake2b
        previous = bytes(self._slot(table, start - 1)) if start else b""
        for position in range(start, end):
            token = tokens[position].to_bytes(4, "big")
            previous = blake2b(previous + token, digest_size=SLOT_BYTES).digest()
            offset = position % size * SLOT_BYTES
            memory[table[position // size]][offset : offset + SLOT_BYTES] = previous

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        for span in self._spans(table, 0, num_tokens):
            digest.update(span)


class _LocalLayer(_Slots):
    """A slot depends on the first and the last one that its token reads, a sample on all those."""

    def __init__(self, memory: Memory, rule: GroupRule) -> None:
        super().__init__(memory, rule.block_size)
        self._rule = rule

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        for position in range(start, end):
            first = self._first_read(position)
            read = b"local"
            if first < position:
                read += bytes(self._slot(table, first)) + bytes(self._slot(table, position - 1))
            self._slot(table, position)[:] = _hash(read, tokens[position])

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        for span in self._spans(table, self._first_read(num_tokens - 1), num_tokens):
            digest.update(span)

    def _first_read(self, position: int) -> int:
        """Return the first position that the token at `position` reads, at most itself."""
        return self._rule.num_skipped_tokens(position)


class _StateLayer(_Slots):
    """The front of a block is the state after its last token, or after the last one computed."""

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        state = bytes(self._state(table, start)) if start else b"state"
        for position in range(start, end):
            state = _hash(state, tokens[position])
            is_last = position + 1 == end
            at_border = (position + 1) % self._block_size == 0
            if is_last or (at_border and table[position // self._block_size]):
                self._state(table, position + 1)[:] = state

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        digest.update(self._state(table, num_tokens))

    def _state(self, table: Sequence[int], num_tokens: int) -> memoryview:
        block_id = table[(num_tokens - 1) // self._block_size]
        assert block_id, f"the state after {num_tokens} tokens is in the null block"
        return memoryview(self._memory[block_id])[:SLOT_BYTES]


class _NonCausalLayer(_Slots):
    """A slot depends on the whole prompt, so nobody else can use it."""

    def enter(
        self, table: Sequence[int], tokens: Sequence[int], prompt_digest: bytes, end: int
    ) -> None:
        self.write(table, tokens, prompt_digest, 0, end)

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        for position in range(start, end):
            content = _hash(prompt_digest, position, tokens[position])
            self._slot(table, position)[:] = content

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        for span in self._spans(table, 0, num_tokens):
            digest.update(span)


class _EncoderLayer(_Slots):
    """Slots of an encoder's output, which stands in for the prompt; written once per entry."""

    def __init__(self, memory: Memory, block_size: int, num_tokens: int) -> None:
        super().__init__(memory, block_size)
        self._num_tokens = num_tokens

    def enter(
        self, table: Sequence[int], tokens: Sequence[int], prompt_digest: bytes, end: int
    ) -> None:
        for position in range(self._num_tokens):
            self._slot(table, position)[:] = _hash(prompt_digest, position)

    def write(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        prompt_digest: bytes,
        start: int,
        end: int,
    ) -> None:
        """Nothing: the encoder's output does not grow."""

    def read(self, table: Sequence[int], num_tokens: int, digest: Digest) -> None:
        for span in self._spans(table, 0, self._num_tokens):
            digest.update(span)


def digest_of(tokens: Sequence[int]) -> bytes:
    """Return a digest of token ids."""
    return _hash(b"", *tokens)


def _hash(contents: bytes, *numbers: int) -> bytes:
    packed = b"".join([number.to_bytes(4, "big") for number in numbers])
    return hashlib.blake2b(contents + packed, digest_size=SLOT_BYTES).digest()

"""What this gateway has running where: one account per target, one entry per attempt.

It is the load signal that cannot be stale; what other gateways run comes from the index. It
decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvindex.index import Target

AttemptKey = tuple[str, int]
"""(request id, attempt)."""

_NEWEST = 0.05
"""How much the newest of the answers counts in their means."""


@dataclass(slots=True)
class Account:
    """The work of this gateway at one target; never negative, 0 when nothing runs.

    `block_refs` counts the running requests by block of their prompts: the engine holds those
    blocks, or is computing them, for as long as one of them runs. `num_held_tokens` is what these
    blocks and the rest of the prompts fill. The means are of answered requests, the newest counting
    most: their output, and the seconds from their placement to their end.
    """

    num_active: int = 0
    prefill_tokens: int = 0
    last_placed: int = 0
    num_held_tokens: int = 0
    mean_output_tokens: float = 0.0
    mean_duration_s: float = 0.0
    block_refs: dict[bytes, int] = field(default_factory=dict)

    def num_running_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks belong to running requests; O(log result).

        By doubling and halving: whoever runs a block runs all that are before it in its chain.
        """
        refs, total = self.block_refs, len(hashes)
        if not total or hashes[0] not in refs:
            return 0
        end = 1
        while end <= total and hashes[end - 1] in refs:
            end *= 2
        first, last = end // 2, min(end - 1, total)
        if first == last:
            return first
        return bisect_left(hashes, True, lo=first, hi=last, key=lambda block: block not in refs)

    def hold(self, entry: Entry) -> None:
        """Count one more running request, with the blocks of its prompt."""
        refs, hashes = self.block_refs, entry.hashes
        self.num_active += 1
        self.prefill_tokens += entry.prefill_tokens
        num_shared = self.num_running_blocks(hashes)
        for block in hashes[:num_shared]:
            refs[block] += 1
        for block in hashes[num_shared:]:
            refs[block] = 1
        num_new = len(hashes) - num_shared
        self.num_held_tokens += num_new * entry.block_size + entry.num_loose_tokens

    def let_go(self, entry: Entry) -> None:
        """Count one less, and what is left of its prefill no more."""
        refs, hashes = self.block_refs, entry.hashes
        self.num_active -= 1
        self.prefill_tokens -= entry.prefill_tokens
        # Whoever else runs a block runs all before it, so the counts fall along the chain.
        num_shared = bisect_left(hashes, True, key=lambda block: refs[block] == 1)
        for block in hashes[:num_shared]:
            refs[block] -= 1
        for block in hashes[num_shared:]:
            del refs[block]
        num_gone = len(hashes) - num_shared
        self.num_held_tokens -= num_gone * entry.block_size + entry.num_loose_tokens

    def learn(self, *, num_output_tokens: int, duration_s: float) -> None:
        """Take in one answered request."""
        share = _NEWEST if self.mean_duration_s else 1.0
        self.mean_output_tokens += share * (num_output_tokens - self.mean_output_tokens)
        self.mean_duration_s += share * (duration_s - self.mean_duration_s)


class Entry(msgspec.Struct):  # made with nearly all of its fields by name, where structs are quick
    """One running attempt; `prefill_tokens` falls to 0 at its first token.

    `num_loose_tokens` of its prompt are in none of the blocks that `hashes` names. `model` and
    `tenant` name the queue that it came from, None when it did not wait.
    """

    target: Target
    prefill_tokens: int
    hashes: tuple[bytes, ...]
    probe: bool
    placed_at: float
    block_size: int = 0
    num_loose_tokens: int = 0
    model: str | None = None
    tenant: str = ""


@dataclass(slots=True)
class Ledger:
    """Accounts by target. Each entry is opened once and closed once; closing twice is harmless."""

    accounts: dict[Target, Account] = field(default_factory=dict)
    entries: dict[AttemptKey, Entry] = field(default_factory=dict)
    num_placed: int = 0

    def account(self, target: Target) -> Account:
        """Return the account of a target, an empty one when nothing was ever placed there."""
        return self.accounts.get(target) or Account()

    def open(self, key: AttemptKey, entry: Entry) -> None:
        """Count an attempt as running at its target."""
        assert key not in self.entries, f"attempt {key} is placed twice"
        self.num_placed += 1
        self.entries[key] = entry
        account = self.accounts.get(entry.target)
        if account is None:
            account = self.accounts[entry.target] = Account()
        account.last_placed = self.num_placed
        account.hold(entry)

    def end_prefill(self, key: AttemptKey) -> Entry | None:
        """Stop counting the prefill of an attempt; None when it is not running."""
        entry = self.entries.get(key)
        if entry is not None and entry.prefill_tokens:
            self.accounts[entry.target].prefill_tokens -= entry.prefill_tokens
            entry.prefill_tokens = 0
        return entry

    def close(self, key: AttemptKey) -> Entry | None:
        """Stop counting an attempt at all; None when it is not running."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.accounts[entry.target].let_go(entry)
        return entry

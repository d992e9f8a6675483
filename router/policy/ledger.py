"""What this gateway has running where: one account per target, one entry per attempt.

It is the load signal that cannot be stale; what other gateways run comes from the index. It
decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvindex.index import Target

AttemptKey = tuple[str, int]
"""(request id, attempt)."""


@dataclass(slots=True)
class Account:
    """The work of this gateway at one target; never negative, 0 when nothing runs.

    `block_refs` counts the running requests by block of their prompts: the engine holds those
    blocks, or is computing them, for as long as one of them runs.
    """

    num_active: int = 0
    prefill_tokens: int = 0
    last_placed: int = 0
    block_refs: Counter[bytes] = field(default_factory=Counter)

    def num_running_blocks(self, hashes: Sequence[bytes], *, at_least: int = 1) -> int:
        """Return how many leading blocks belong to `at_least` running requests; O(result)."""
        refs = self.block_refs
        if len(refs) == 0 or self.num_active < at_least:
            return 0
        cold = (i for i, block in enumerate(hashes) if refs.get(block, 0) < at_least)
        return next(cold, len(hashes))


@dataclass(slots=True)
class Entry:
    """One running attempt; `prefill_tokens` falls to 0 at its first token.

    `model` and `tenant` name the queue that it came from, None when it did not wait.
    """

    target: Target
    prefill_tokens: int
    hashes: tuple[bytes, ...]
    probe: bool
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
        target, prefill_tokens = entry.target, entry.prefill_tokens
        self.num_placed += 1
        self.entries[key] = entry
        account = self.accounts.setdefault(target, Account())
        account.num_active += 1
        account.prefill_tokens += prefill_tokens
        account.last_placed = self.num_placed
        account.block_refs.update(entry.hashes)

    def end_prefill(self, key: AttemptKey) -> Entry | None:
        """Stop counting the prefill of an attempt; None when it is not running."""
        entry = self.entries.get(key)
        if entry is not None:
            self.accounts[entry.target].prefill_tokens -= entry.prefill_tokens
            entry.prefill_tokens = 0
        return entry

    def close(self, key: AttemptKey) -> Entry | None:
        """Stop counting an attempt at all; None when it is not running."""
        entry = self.end_prefill(key)
        if entry is not None:
            account = self.accounts[entry.target]
            account.num_active -= 1
            account.block_refs.subtract(entry.hashes)
            for block in entry.hashes:
                if not account.block_refs[block]:
                    del account.block_refs[block]
            del self.entries[key]
        return entry

"""The index in memory: what RedisIndex does, as plain data structures with an injected clock.

`MemoryIndex` is synchronous and serves the simulator and tests; `AsyncMemoryIndex` gives it the
asynchronous face. It is not shared between processes and knows no Redis.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from kvindex.foundation.clock import Clock, SystemClock
from kvindex.hit_rule import CacheLayout
from kvindex.index import (
    Announcement,
    ApplyResult,
    IndexOp,
    LoadReport,
    PrefillEnd,
    Reservation,
    SequencedOps,
    Target,
    TargetMatch,
    TargetState,
)

Part = tuple[int, str]
"""A group and a tier."""

Inventory = dict[Part, set[bytes]]
"""Hashes by their last 8 bytes, which is all that some engines tell of them."""

_GPU: Part = (0, "gpu")
_HOST: Part = (0, "host")
_short = itemgetter(slice(-8, None))
_NOTHING: AbstractSet[bytes] = frozenset()


@dataclass(slots=True)
class _Reserved:
    """A reservation; `is_counted` ends with its release, its pending blocks with their time."""

    gateway: str
    prefill_tokens: int
    num_blocks: int
    pending: frozenset[bytes]
    pending_until: float
    is_counted: bool = True


@dataclass(slots=True)
class _TargetState:
    epoch: int
    lapses_at: float
    layout: CacheLayout | None = None
    next_seq: int = 0
    report: LoadReport = field(default_factory=LoadReport)
    inventory: Inventory = field(default_factory=dict)
    reserved: dict[tuple[str, int], _Reserved] = field(default_factory=dict)


class MemoryIndex:
    """The synchronous twin of `PrefixIndex` (kvindex/index.py); same rules, same answers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._targets: dict[Target, _TargetState] = {}
        self._epochs: dict[Target, int] = {}
        self._gateways: dict[str, float] = {}

    def register(
        self, target: Target, *, boot_ns: int, lease_s: float, layout: CacheLayout | None = None
    ) -> int:
        """Open a new epoch, max(stored + 1, boot_ns), with an empty inventory; return it."""
        epoch = max(self._epochs.get(target, -1) + 1, boot_ns)
        self._epochs[target] = epoch
        lapses_at = self._clock.monotonic() + lease_s
        states = {**self._targets, target: _TargetState(epoch, lapses_at, layout=layout)}
        self._targets = dict(sorted(states.items()))
        return epoch

    def renew(self, target: Target, epoch: int, *, lease_s: float, report: LoadReport) -> bool:
        """Extend the lease; False when it has lapsed or the epoch is old: register again."""
        state = self._current(target, epoch)
        if state is None:
            return False
        state.lapses_at = self._clock.monotonic() + lease_s
        state.report = report
        return True

    def deregister(self, target: Target, epoch: int) -> None:
        """Drop a target at once; an old epoch changes nothing."""
        state = self._targets.get(target)
        if state is not None and state.epoch == epoch:
            del self._targets[target]

    def apply(self, target: Target, epoch: int, batches: Sequence[SequencedOps]) -> ApplyResult:
        """Apply batches in order, each at most once, up to the first gap."""
        state = self._current(target, epoch)
        if state is None:
            return ApplyResult(status="fenced", applied_seq=None)
        for batch in batches:
            if batch.seq > state.next_seq:
                return ApplyResult(status="gap", applied_seq=_applied_seq(state))
            if batch.seq == state.next_seq:
                for op in batch.ops:
                    _change(state.inventory, op)
                state.next_seq = batch.seq + 1
        return ApplyResult(status="applied", applied_seq=_applied_seq(state))

    def load_snapshot(
        self, target: Target, epoch: int, *, seq: int, ops: Sequence[IndexOp]
    ) -> bool:
        """Replace the inventory by `ops` as of sequence `seq`; False when fenced."""
        state = self._current(target, epoch)
        if state is None:
            return False
        state.inventory = {}
        for op in ops:
            _change(state.inventory, op)
        state.next_seq = seq + 1
        return True

    def match(self, hashes: Sequence[bytes]) -> list[TargetMatch]:
        """Return every live target with what it holds of the chain."""
        deepest_first, found, likely = _shortened(hashes)[::-1], list[TargetMatch](), 0
        now = self._clock.monotonic()
        for target, state in self._targets.items():
            if state.lapses_at <= now:
                continue
            matched, host = _matched(state, deepest_first, likely)
            likely = matched - host
            match = TargetMatch(
                target=target,
                epoch=state.epoch,
                matched_blocks=matched,
                host_blocks=host,
                report=state.report,
            )
            found.append(self._reserved(match, state, deepest_first) if state.reserved else match)
        return found

    def touch_gateway(self, gateway: str, *, lease_s: float) -> None:
        """Keep a gateway's reservations counted for another `lease_s`."""
        now = self._clock.monotonic()
        lapsed = {name for name, lapses_at in self._gateways.items() if lapses_at <= now}
        for state in self._targets.values():
            state.reserved = {
                key: entry for key, entry in state.reserved.items() if entry.gateway not in lapsed
            }
        for name in lapsed:
            del self._gateways[name]
        self._gateways[gateway] = now + lease_s

    def reserve(self, reservation: Reservation) -> None:
        """Count the work at once; the same (request, attempt) counts once.

        Nothing is counted for a target or a gateway without a live lease.
        """
        now = self._clock.monotonic()
        state = self._targets.get(reservation.target)
        if state is None or state.lapses_at <= now or not self._is_live(reservation.gateway):
            return
        _forget_ended(state, now)
        key = (reservation.request_id, reservation.attempt)
        if key not in state.reserved:
            state.reserved[key] = _Reserved(
                gateway=reservation.gateway,
                prefill_tokens=reservation.prefill_tokens,
                num_blocks=reservation.num_blocks,
                pending=frozenset(_shortened(reservation.pending)),
                pending_until=now + reservation.pending_ttl_s,
            )

    def release_prefill(self, target: Target, request_id: str, attempt: int) -> None:
        """Stop counting the prefill tokens: the first token has come. Idempotent."""
        state = self._targets.get(target)
        entry = state.reserved.get((request_id, attempt)) if state else None
        if entry is not None:
            entry.prefill_tokens = 0

    def release(self, target: Target, request_id: str, attempt: int, *, written: bool) -> None:
        """Stop counting the request; unless its blocks were `written`, withdraw its pending ones.

        Written blocks stay pending until their time is over: their events may be on the way.
        """
        state = self._targets.get(target)
        entry = state.reserved.get((request_id, attempt)) if state else None
        if state is None or entry is None:
            return
        if written and entry.pending_until > self._clock.monotonic():
            entry.is_counted = False
        else:
            del state.reserved[request_id, attempt]

    def states(self) -> list[TargetState]:
        """List the live targets; `num_blocks` is by tier, over all groups."""
        now = self._clock.monotonic()
        return [
            TargetState(
                target=target,
                epoch=state.epoch,
                applied_seq=_applied_seq(state),
                num_blocks=_num_blocks(state.inventory),
                lease_left_s=state.lapses_at - now,
                report=state.report,
            )
            for target, state in self._targets.items()
            if state.lapses_at > now
        ]

    def _current(self, target: Target, epoch: int) -> _TargetState | None:
        """Return the target's state if `epoch` is its current one and its lease has not lapsed."""
        state = self._targets.get(target)
        if state is None or state.epoch != epoch or state.lapses_at <= self._clock.monotonic():
            return None
        return state

    def _is_live(self, gateway: str) -> bool:
        return self._gateways.get(gateway, 0.0) > self._clock.monotonic()

    def _reserved(
        self, match: TargetMatch, state: _TargetState, deepest_first: Sequence[bytes]
    ) -> TargetMatch:
        """Add what live gateways have reserved at a target."""
        now = self._clock.monotonic()
        live = [entry for entry in state.reserved.values() if self._is_live(entry.gateway)]
        counted = [entry for entry in live if entry.is_counted]
        pending = [entry.pending for entry in live if entry.pending_until > now]
        return msgspec.structs.replace(
            match,
            pending_blocks=_longest_run(
                deepest_first, match.matched_blocks, lambda h: any(h in p for p in pending)
            ),
            reserved_prefill_tokens=sum(entry.prefill_tokens for entry in counted),
            reserved_blocks=sum(entry.num_blocks for entry in counted),
            num_reserved=len(counted),
        )


class AsyncMemoryIndex:
    """`PrefixIndex` over a `MemoryIndex`, for one process: tests and a fleet without Redis."""

    def __init__(self, index: MemoryIndex | None = None) -> None:
        self.index = index or MemoryIndex()

    async def register(
        self, target: Target, *, boot_ns: int, lease_s: float, layout: CacheLayout | None = None
    ) -> int:
        return self.index.register(target, boot_ns=boot_ns, lease_s=lease_s, layout=layout)

    async def renew(
        self, target: Target, epoch: int, *, lease_s: float, report: LoadReport
    ) -> bool:
        return self.index.renew(target, epoch, lease_s=lease_s, report=report)

    async def deregister(self, target: Target, epoch: int) -> None:
        self.index.deregister(target, epoch)

    async def apply(
        self, target: Target, epoch: int, batches: Sequence[SequencedOps]
    ) -> ApplyResult:
        return self.index.apply(target, epoch, batches)

    async def load_snapshot(
        self, target: Target, epoch: int, *, seq: int, ops: Sequence[IndexOp]
    ) -> bool:
        return self.index.load_snapshot(target, epoch, seq=seq, ops=ops)

    async def match(self, hashes: Sequence[bytes]) -> list[TargetMatch]:
        return self.index.match(hashes)

    async def touch_gateway(self, gateway: str, *, lease_s: float) -> None:
        self.index.touch_gateway(gateway, lease_s=lease_s)

    async def reserve(self, reservation: Reservation) -> None:
        self.index.reserve(reservation)

    async def release_prefill(self, target: Target, request_id: str, attempt: int) -> None:
        self.index.release_prefill(target, request_id, attempt)

    async def release(
        self, target: Target, request_id: str, attempt: int, *, written: bool
    ) -> None:
        self.index.release(target, request_id, attempt, written=written)

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        for one in announcements:
            if isinstance(one, Reservation):
                await self.reserve(one)
            elif isinstance(one, PrefillEnd):
                await self.release_prefill(one.target, one.request_id, one.attempt)
            else:
                await self.release(one.target, one.request_id, one.attempt, written=one.written)

    async def states(self) -> list[TargetState]:
        return self.index.states()

    async def close(self) -> None:
        """Do nothing: there are no connections."""


@dataclass(slots=True)
class _Held:
    """`GroupPresence` of one group, on gpu and host together."""

    chain: Sequence[bytes]
    tiers: tuple[set[bytes], ...]
    stride: int

    def num_leading(self, limit: int) -> int:
        """Return how many of the group's first blocks are held without a gap."""
        ends = range(self.stride - 1, min(len(self.chain), limit * self.stride), self.stride)
        return next((i for i, end in enumerate(ends) if not self.has(end)), len(ends))

    def has(self, position: int) -> bool:
        """Tell whether a block is held that ends at this position of the chain."""
        return position < len(self.chain) and any(self.chain[position] in t for t in self.tiers)


def _matched(state: _TargetState, deepest_first: Sequence[bytes], likely: int) -> tuple[int, int]:
    """Return the blocks of the engine's hit, and how many of them are on the host only.

    `likely`: the blocks on the gpu of another target, because most hold the same of a chain.
    """
    layout = state.layout
    if layout is None:
        gpu, host = state.inventory.get(_GPU, _NOTHING), state.inventory.get(_HOST, _NOTHING)
        on_gpu, beyond = likely, len(deepest_first) - likely
        if (
            not likely
            or deepest_first[beyond] not in gpu
            or (beyond and deepest_first[beyond - 1] in gpu)
        ):
            on_gpu = _longest_run(deepest_first, 0, gpu.__contains__)
        if not host:
            return on_gpu, 0
        matched = _longest_run(deepest_first, 0, lambda h: h in gpu or h in host)
        return matched, matched - on_gpu
    unit, chain = layout.hash_block_size, deepest_first[::-1]
    held = [
        _Held(
            chain,
            tuple(state.inventory.get((i, tier), set()) for tier in ("gpu", "host")),
            group.block_size // unit,
        )
        for i, group in layout.cached_groups.items()
    ]
    return layout.rule().longest(held, max_tokens=len(chain) * unit) // unit, 0


def _applied_seq(state: _TargetState) -> int | None:
    return state.next_seq - 1 if state.next_seq else None


def _change(inventory: Inventory, op: IndexOp) -> None:
    if op.kind == "cleared":
        inventory.clear()
        return
    held = inventory.setdefault((op.group, op.tier), set())
    if op.kind == "stored":
        held.update(_shortened(op.hashes))
    else:
        held.difference_update(_shortened(op.hashes))


def _shortened(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return the last 8 bytes of each; those of one engine all have the same length."""
    return hashes if not hashes or len(hashes[0]) == 8 else list(map(_short, hashes))


def _forget_ended(state: _TargetState, now: float) -> None:
    ended = [
        key
        for key, entry in state.reserved.items()
        if not entry.is_counted and entry.pending_until <= now
    ]
    for key in ended:
        del state.reserved[key]


def _num_blocks(inventory: Inventory) -> dict[str, int]:
    sizes = {"gpu": 0, "host": 0}
    for (_, tier), held in inventory.items():
        sizes[tier] += len(held)
    return sizes


def _longest_run(deepest_first: Sequence[bytes], first: int, holds: Callable[[bytes], bool]) -> int:
    """Count the positions from `first` on whose hash is held, by halving, as in lua/match.lua.

    1 + log2(n) probes: inventories are prefix-closed, because an engine evicts a block only after
    its children. From the deepest on, what is held comes after what is not, as bisect wants it.
    """
    num_left = len(deepest_first) - first
    if num_left <= 0 or not holds(deepest_first[num_left - 1]):
        return 0
    return num_left - bisect_left(deepest_first, True, hi=num_left - 1, key=holds)

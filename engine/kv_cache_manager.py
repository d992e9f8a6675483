"""Block tables of running requests over one pool: hits, allocation and two-phase commit.

A hash becomes findable only after the step that wrote its block has returned. Until then it is
*pending*: a request that needs it can wait for its writer instead of computing it again. It knows
no queues and no budgets (scheduler.py); what differs between cache groups is in kv_groups/.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.block import Block
from engine.block_contents import BlockContents
from engine.block_pool import BlockPool
from engine.kv_groups.block_table import GroupTable, Progress, RequestTable
from engine.kv_groups.coordinator import HitCoordinator, PrefixHit
from engine.kv_groups.group import InFlight, KVGroup, resolve_groups
from engine.kv_groups.live_prefixes import LivePrefixes
from engine.kv_groups.spec import ONE_FULL_ATTENTION_GROUP, KVGroupSpec
from engine.kv_groups.states import note_states, take_replaced
from engine.pending_run import PendingRun
from engine.request import Request
from engine.restore_cost import RestoreCost
from engine.transfer import BlockTransfer
from kvindex.hashing import BlockHash
from kvindex.hit_rule import CacheLayout, GroupRule

_NOTHING_NEW: list[list[int]] = []


class KVCacheManager:
    """The KV cache of one engine; raises ConfigError when the groups cannot share the pool.

    `in_flight` bounds how far scheduling runs ahead, and so what windowed groups may hold.
    `restore_cost` decides whether a hit takes what is only in the host tier; without one it does.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        groups: Sequence[KVGroupSpec] = ONE_FULL_ATTENTION_GROUP,
        enable_caching: bool = True,
        in_flight: InFlight | None = None,
        restore_cost: RestoreCost | None = None,
    ) -> None:
        assert pool.num_groups == len(groups), "the pool is made for other groups"
        self.pool = pool
        self.enable_caching = enable_caching
        self.groups = resolve_groups(groups, hash_block_size=pool.block_size)
        self.tables: dict[str, RequestTable] = {}
        self.num_reserved = 0
        self._contents: BlockContents | None = None
        self._coordinator = HitCoordinator(pool, self.groups)
        self._in_flight = in_flight or InFlight()
        self._restore_cost = restore_cost
        self._cacheable = [group for group in self.groups if group.rule is not None]
        self._recycling = [group for group in self.groups if group.recycles]
        self._keeping = [group for group in self.groups if not group.recycles]
        self._states = [group for group in self.groups if group.is_state]
        self.prefixes = LivePrefixes(is_kept=bool(self._states))
        self._growing = [group for group in self.groups if group.grows]
        self._commits: dict[int, list[PendingRun]] = {}
        self._progress: dict[int, list[Progress]] = {}
        self._writers: dict[BlockHash, RequestTable] = {}

    def keep_contents(self) -> BlockContents:
        """Remember from now on, before the first request, what cached blocks hold."""
        self._contents = BlockContents([group.rule for group in self.groups])
        return self._contents

    @property
    def tracks_progress(self) -> bool:
        """Whether every step must be queued for commit, not only those that complete a block."""
        return bool(self._recycling)

    def max_num_tokens(self, num_blocks: int) -> int | None:
        """Return the longest sequence that fits alone into so many blocks; None when any does."""
        num_usable = num_blocks - 1
        fits, too_long = 0, 1
        while self._max_held_blocks(too_long) <= num_usable:
            fits, too_long = too_long, too_long * 2
            if fits > num_usable * max(group.block_size for group in self.groups):
                return None
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._max_held_blocks(middle) <= num_usable:
                fits = middle
            else:
                too_long = middle
        return fits

    @property
    def layout(self) -> CacheLayout | None:
        """What an index needs to know of the groups; None of one group that holds whole chains."""
        whole = GroupRule(kind="full", block_size=self.pool.block_size)
        groups = self._coordinator.layout.groups
        return None if groups == (whole,) else self._coordinator.layout

    def find_hit(self, request: Request) -> PrefixHit:
        """Return the longest known prefix that every group has cached; changes nothing.

        At least the last known token is left to compute, because its logits are needed; of a
        request that lacks log probabilities of its prompt, all of them are.
        """
        if not self.enable_caching or request.lacks_prompt_logprobs:
            return self._coordinator.no_hit()
        hashes, max_tokens = request.chain.hashes, request.num_tokens - 1
        hit = self._coordinator.find(hashes, max_tokens=max_tokens)
        if hit.on_host and self._restore_cost is not None:
            resident = self._coordinator.find(hashes, max_tokens=max_tokens, resident_only=True)
            if not self._restore_cost.is_worth_restoring(
                num_blocks=len(hit.on_host), num_tokens=hit.num_tokens - resident.num_tokens
            ):
                return resident
        return hit

    def awaited(self, request: Request, hit: PrefixHit) -> BlockHash | None:
        """Return the next hash after a hit if a running request is about to commit it.

        The block of the last known token is never worth waiting for: it must be computed anyway.
        """
        end = hit.num_tokens + self._coordinator.granularity
        if not self.enable_caching or request.lacks_prompt_logprobs or end >= request.num_tokens:
            return None
        block_hash = request.chain.hashes[end // self.pool.block_size - 1]
        return block_hash if block_hash in self._writers else None

    @property
    def num_open_steps(self) -> int:
        """Steps whose writes are noted and not committed yet."""
        return len(self._commits.keys() | self._progress.keys())

    def is_pending(self, block_hash: bytes) -> bool:
        """Tell whether some running request is still about to commit the hash."""
        return block_hash in self._writers

    def can_fit(self, hit: PrefixHit, *, num_tokens: int, spare_blocks: int) -> bool:
        """Tell whether `num_tokens` fit after a hit, with `spare_blocks` left; changes nothing.

        A hit saves the blocks that are in use already; free ones it takes out of the pool. In a
        group that gives blocks back it saves none: what is shared now is not shared for long.
        """
        num_missing = self._max_held_blocks(num_tokens) + spare_blocks
        num_missing -= self.pool.num_free - self.num_reserved
        if num_missing <= 0:
            return True  # Even if the hit saved nothing.
        in_use = sum(
            1 for group in self._keeping for block in hit.blocks[group.index] if block.ref_cnt
        )
        return num_missing <= in_use

    def admit(self, request: Request, hit: PrefixHit, *, reserve_tokens: int | None = None) -> None:
        """Open block tables that start with the hit and claim the hashes to be written.

        With `reserve_tokens`, the blocks that so many tokens may take are set aside. The caller
        has checked that they fit.
        """
        assert request.request_id not in self.tables, f"{request.request_id} has blocks already"
        unit, num_tokens = self.pool.block_size, hit.num_tokens
        tables = [GroupTable(blocks, num_queued=num_tokens // unit) for blocks in hit.blocks]
        for group in self._recycling:
            tables[group.index].num_skipped = group.num_skipped_blocks(num_tokens)
        self._adopt(hit, tables, tenant=request.source.tenant)
        table = RequestTable(tables, num_tokens, num_tokens // unit, {hit.num_shared})
        self.tables[request.request_id] = table
        if reserve_tokens is not None:
            table.has_reserve = True
            table.num_reserved = self._max_held_blocks(reserve_tokens) - table.num_held
            self.num_reserved += table.num_reserved
        if self.enable_caching:
            for block_hash in request.chain.hashes[num_tokens // unit :]:
                self._writers.setdefault(block_hash, table)

    def capacity(self, request: Request) -> int:
        """Return how many tokens a running request has room for."""
        return self.tables[request.request_id].capacity

    def extend(
        self, request: Request, num_tokens: int, *, spare_blocks: int = 0
    ) -> list[list[int]] | None:
        """Make room for `num_tokens` tokens; return the ids of new blocks per group.

        An empty list when nothing is new; None, with no block handed out, when it cannot, or when
        fewer than `spare_blocks` would be left.
        """
        table = self.tables[request.request_id]
        if num_tokens <= table.capacity:
            return _NOTHING_NEW
        if self._recycling:
            self._recycle(table)
        if self._states:
            table.partings |= self.prefixes.partings(request, table.num_hashed, num_tokens)
        wanted = [
            group.new_indices(len(held.blocks), num_tokens, partings=table.partings)
            for group, held in zip(self.groups, table.groups, strict=True)
        ]
        num_wanted = sum(map(len, wanted))
        num_free = self.pool.num_free - self.num_reserved + table.num_reserved
        if num_wanted + spare_blocks > num_free:
            return None
        tenant = request.source.tenant
        new_ids = [
            self._append(g, table.groups[g], indices, tenant=tenant)
            for g, indices in enumerate(wanted)
        ]
        num_drawn = min(num_wanted, table.num_reserved)
        table.num_reserved -= num_drawn
        self.num_reserved -= num_drawn
        table.capacity = min(
            len(table.groups[group.index].blocks) * group.block_size for group in self._growing
        )
        return new_ids

    def block_ids(self, request: Request) -> list[list[int]]:
        """Return a request's whole block tables as ids, one list per group."""
        return self.tables[request.request_id].block_ids

    def take_transfers(self) -> list[BlockTransfer]:
        """Return the moves of blocks asked for since the last call, in the order to apply them."""
        return self.pool.take_transfers()

    def queue_commits(self, request: Request, step: int, *, num_computed_tokens: int) -> None:
        """Note the blocks that are full once `step` has computed up to `num_computed_tokens`.

        Tokens that a step in flight is yet to sample have no hash; call it again for the same
        step when they are known.
        """
        table, hashes = self.tables[request.request_id], request.chain.hashes
        num_hashed = min(num_computed_tokens // self.pool.block_size, len(hashes))
        if self._recycling:
            passed = hashes[table.num_hashed : num_hashed]
            progress = Progress(table, num_computed_tokens, passed)
            self._progress.setdefault(step, []).append(progress)
        if num_hashed <= table.num_hashed or not self.enable_caching:
            return
        commits = self._commits.setdefault(step, [])
        for group in self._cacheable:
            run = self._completed(group, table.groups[group.index], request, num_hashed, step)
            if run.blocks:
                commits.append(run)
            if group.is_state:
                note_states(table, group, request, run)
        table.num_hashed = num_hashed

    def commit_step(self, step: int) -> None:
        """Make findable what `step` has written, except blocks that were given back meanwhile.

        A hash that no group keeps is not pending any more either.
        """
        if self._contents is not None:
            self._contents.written(step)
        for run in self._commits.pop(step, ()):
            for held in run.held_parts():
                self.pool.commit_run(
                    held.blocks, held.hashes, held.parent_hash, lora_name=held.lora_name
                )
                for block_hash in held.hashes:
                    self._writers.pop(block_hash, None)
        for progress in self._progress.pop(step, ()):
            progress.table.num_processed = progress.num_computed_tokens
            for group in self._states:
                states = progress.table.groups[group.index].states
                for block in take_replaced(states, progress.num_computed_tokens):
                    self.pool.discard(block)
            self._release_claims(progress.table, progress.hashes)

    def resize(self, num_blocks: int) -> None:
        """Make the pool so large; whoever is displaced by that has given his blocks back."""
        closed = [g.index for g in self._cacheable if not g.recycles]
        if num_blocks < self.pool.num_blocks:
            self.pool.shrink(num_blocks, closed_groups=closed)
        elif num_blocks > self.pool.num_blocks:
            self.pool.grow(num_blocks)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, deepest first, and its claims; a no-op without any."""
        table = self.tables.pop(request.request_id, None)
        if table is None:
            return
        self.num_reserved -= table.num_reserved
        self.pool.free(self._deepest_first(table))
        self._release_claims(table, request.chain.hashes)

    def _release_claims(self, table: RequestTable, hashes: Sequence[BlockHash]) -> None:
        writers = self._writers
        for block_hash in hashes if writers else ():
            if writers.get(block_hash) is table:
                del writers[block_hash]

    def _max_held_blocks(self, num_tokens: int) -> int:
        return sum(group.max_held_blocks(num_tokens, self._in_flight) for group in self.groups)

    def _adopt(self, hit: PrefixHit, tables: list[GroupTable], *, tenant: str | None) -> None:
        """Take the blocks of a hit into use; bring back those that are only in the host tier.

        NOTE: all that the hit needs is held or pinned before the first block is handed out, which
        may evict anything else from either tier. A tail may itself be handed out here, for it
        counts as free; tails are moved to the end of the queue first, in the order in which they
        are copied, and transfers are carried out in order: none is overwritten before it is read.
        """
        for found in hit.blocks:
            self.pool.touch([b for b in found if not b.on_host] if hit.on_host else found)
        for tail in hit.tails:
            if tail is not None and not tail.on_host:
                self.pool.refresh(tail)
        if self.pool.host is not None and hit.on_host:
            self.pool.host.pin(hit.on_host)
            for table in tables:
                for i, block in enumerate(table.blocks):
                    if block.on_host:
                        table.blocks[i] = self.pool.restore(block, tenant=tenant)
        self._copy_tails(hit, tables, tenant=tenant)
        if self.pool.host is not None and hit.on_host:
            self.pool.host.unpin(hit.on_host[::-1])
        self.pool.settle()

    def _copy_tails(self, hit: PrefixHit, tables: list[GroupTable], *, tenant: str | None) -> None:
        """Give the request its own copy of each block that it takes over in part."""
        for g, tail in enumerate(hit.tails):
            if tail is None:
                continue
            (own,) = self.pool.allocate(1, g, tenant=tenant)
            self.pool.copy(tail, own)
            stride = self.groups[g].block_size // self.pool.block_size
            tables[g].num_queued = len(tables[g].blocks) * stride
            tables[g].blocks.append(own)

    def _append(
        self, group: int, table: GroupTable, indices: Sequence[int], *, tenant: str | None
    ) -> list[int]:
        """Append new blocks at the given indices, the null block in between; return their ids."""
        blocks = table.blocks
        start = len(blocks)
        new = self.pool.allocate(len(indices), group, tenant=tenant)
        for i, block in zip(indices, new, strict=True):
            while len(blocks) < i:
                blocks.append(self.pool.null_block)
            blocks.append(block)
        return [block.block_id for block in blocks[start:]]

    def _recycle(self, table: RequestTable) -> None:
        """Give back what no group reads any more, even in the steps in flight.

        NOTE: a reserve gets back what becomes free. It is short of a block that others still
        share; `can_fit` counted that one for them too, so one of the running can always go on.
        """
        for group in self._recycling:
            held = table.groups[group.index]
            end = min(group.num_skipped_blocks(table.num_processed), len(held.blocks))
            skipped = [b for b in held.blocks[held.num_skipped : end] if b.block_id]
            for i in range(held.num_skipped, end):
                held.blocks[i] = self.pool.null_block
            held.num_skipped = max(held.num_skipped, end)
            num_free = self.pool.num_free
            self.pool.free(skipped[::-1])
            if table.has_reserve:
                table.num_reserved += self.pool.num_free - num_free
                self.num_reserved += self.pool.num_free - num_free

    def _completed(
        self, group: KVGroup, table: GroupTable, request: Request, num_hashed: int, step: int
    ) -> PendingRun:
        """Return the hash units of one group up to `num_hashed` that are not queued yet.

        A state exists only at the end of its block, so it has one hash instead of several.
        """
        hashes, first = request.chain.hashes, table.num_queued
        stride = group.block_size // self.pool.block_size
        unit = stride if group.is_state else 1
        ends = range(first + unit, num_hashed + 1, unit)
        blocks = [table.blocks[(end - 1) // stride] for end in ends]
        if self._contents is not None:
            for end, block in zip(ends, blocks, strict=True):
                if block.block_id:
                    self._contents.note(step, group.index, request, end - unit, end)
        table.num_queued = num_hashed // unit * unit
        return PendingRun(
            blocks,
            generations=[block.generation for block in blocks],
            hashes=hashes[first + unit - 1 : num_hashed : unit],
            parent_hash=hashes[first - 1] if first else None,
            lora_name=request.lora_name,
        )

    def _deepest_first(self, table: RequestTable) -> list[Block]:
        """Order all blocks so that eviction shortens the prefix in every group alike."""
        if len(table.groups) == 1 and not self._recycling:
            return table.groups[0].blocks[::-1]
        ends = [
            ((i + 1) * group.block_size, block)
            for group, held in zip(self.groups, table.groups, strict=True)
            for i, block in enumerate(held.blocks)
            if block.block_id
        ]
        ends.sort(key=lambda entry: -entry[0])
        return [block for _, block in ends]

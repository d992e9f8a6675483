"""Traffic as the fleet gets it: rows of a trace, cut, scaled and spread, as engine-sized requests.

A pure stream: one row after the other, the same for the same seed. It does not know when a request
is really sent in the modes that ignore the trace's clock.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator

import msgspec

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import BlockHash
from sim.block_names import BlockNames
from sim.config import Isolation, ReplayConfig, TenantTraffic
from sim.traces.row import TraceHeader, TraceRow

DEFAULT_TENANT = "default"
COPY_LAG_S = 30.0
"""How much later, in the trace's time, each copy of a tenant's scaled traffic runs."""

_AS_RECORDED = TenantTraffic()


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request; `at_s` is when it comes, by the trace's clock and the speed-up.

    `hashes` are those of the full blocks of its prompt, `output_hashes` of those that its output
    completes. `has_prefix` is False where the trace knows lengths only.
    """

    number: int
    line: int
    request_id: str
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: tuple[BlockHash, ...]
    output_hashes: tuple[BlockHash, ...]
    has_prefix: bool
    tenant: str
    session: str | None
    delay_s: float | None
    priority: int
    weight: float

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens


class Workload:
    """The arrivals of one replay; iterating twice gives the same stream twice."""

    def __init__(
        self, header: TraceHeader, rows: Callable[[], Iterable[TraceRow]], config: ReplayConfig
    ) -> None:
        """Take the source of rows; raise ConfigError when the trace's blocks cannot be used."""
        self._rows = rows
        self._config = config
        self.block_size = block_size_of(header, config)
        self._trace_block_size = header.block_size or self.block_size

    def __iter__(self) -> Iterator[Arrival]:
        config = self._config
        names = BlockNames(trace_block_size=self._trace_block_size, block_size=self.block_size)
        rows = _scaled(_cut(self._rows(), config), config)
        if config.jitter:
            rows = _spread(rows, random.Random(config.seed))
        start_s = config.window[0] if config.window else 0.0
        for number, (at_s, copy, row) in enumerate(rows):
            yield self._arrival(names, number, (at_s - start_s) / config.speed_up, copy, row)

    def _arrival(
        self, names: BlockNames, number: int, at_s: float, copy: int, row: TraceRow
    ) -> Arrival:
        tenant = row.tenant or DEFAULT_TENANT
        traffic = self._config.tenants.get(tenant, _AS_RECORDED)
        num_output = max(1, row.output_length)
        scope = _scope(row, copy, self._config.isolation)
        hashes, output_hashes = self._hashes(names, scope, row, num_output)
        request_id = row.request_id or f"line-{row.line}"
        session = row.session_id
        return Arrival(
            number=number,
            line=row.line,
            request_id=f"{request_id}+{copy}" if copy else request_id,
            at_s=at_s,
            num_prompt_tokens=max(1, row.input_length),
            num_output_tokens=num_output,
            hashes=hashes,
            output_hashes=output_hashes,
            has_prefix=row.hash_ids is not None,
            tenant=tenant,
            session=f"{session}+{copy}" if session and copy else session,
            delay_s=row.delay_s,
            priority=row.priority if traffic.priority is None else traffic.priority,
            weight=traffic.weight,
        )

    def _hashes(
        self, names: BlockNames, scope: Hashable, row: TraceRow, num_output: int
    ) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return the hashes of the prompt's blocks and of those that the output completes."""
        num_prompt_blocks = row.input_length // self.block_size
        num_blocks = (row.input_length + num_output) // self.block_size
        if row.hash_ids is None:
            return tuple(names.fresh(num_prompt_blocks)), tuple(
                names.fresh(num_blocks - num_prompt_blocks)
            )
        hashes = names.chain(scope, row.hash_ids, limit=num_prompt_blocks)
        if row.output_hash_ids is None:
            return tuple(hashes), tuple(names.fresh(num_blocks - num_prompt_blocks))
        whole = row.hash_ids[: row.input_length // self._trace_block_size]
        both = names.chain(scope, (*whole, *row.output_hash_ids), limit=num_blocks)
        return tuple(hashes), tuple(both[num_prompt_blocks:])


_Timed = tuple[float, int, TraceRow]
"""When, which copy of the recording, what."""


def block_size_of(header: TraceHeader, config: ReplayConfig) -> int:
    """Return the engine's block size; raise ConfigError when neither trace nor settings say it."""
    size = config.block_size or header.block_size
    if size is None:
        raise ConfigError("the trace has no blocks: give the engine's with --block-size")
    return size


def _scope(row: TraceRow, copy: int, isolation: Isolation) -> Hashable:
    """Return what must be equal, besides the ids, for two requests to share blocks."""
    if isolation == "tenant":
        return (copy, row.tenant)
    if isolation == "session":
        return (copy, row.tenant, row.session_id or row.line)
    if isolation == "recorded":
        return (copy, row.group, row.client_salt)
    return (copy,)


def _cut(rows: Iterable[TraceRow], config: ReplayConfig) -> Iterator[TraceRow]:
    """Leave out what lies outside of the window."""
    if config.window is None:
        yield from rows
        return
    start_s, end_s = config.window
    for row in rows:
        if row.arrival_s >= end_s:
            return
        if row.arrival_s >= start_s:
            yield row


def _scaled(rows: Iterable[TraceRow], config: ReplayConfig) -> Iterator[_Timed]:
    """Repeat or leave out whole sessions, so often as their tenant's scale says; in time order."""
    if not config.tenants:
        yield from ((row.arrival_s, 0, row) for row in rows)
        return
    copies: list[tuple[float, int, int, TraceRow]] = []
    for number, row in enumerate(rows):
        while copies and copies[0][0] <= row.arrival_s:
            at_s, _, copy, late = heapq.heappop(copies)
            yield at_s, copy, late
        traffic = config.tenants.get(row.tenant or DEFAULT_TENANT, _AS_RECORDED)
        for copy in range(_num_copies(row, traffic.scale, config.seed)):
            if copy == 0:
                yield row.arrival_s, 0, row
            else:
                at_s = row.arrival_s + copy * COPY_LAG_S
                heapq.heappush(copies, (at_s, number, copy, row))
    while copies:
        at_s, _, copy, late = heapq.heappop(copies)
        yield at_s, copy, late


def _num_copies(row: TraceRow, scale: float, seed: int) -> int:
    """Return how often a row is played; all rows of a session get the same answer."""
    whole = int(scale)
    if scale == whole:
        return whole
    key = f"{seed} {row.tenant} {row.session_id or row.line}".encode()
    return whole + (zlib.crc32(key) / 2**32 < scale - whole)


def _spread(rows: Iterable[_Timed], source: random.Random) -> Iterator[_Timed]:
    """Place the rows of one instant uniformly between it and the next one."""
    tick: list[_Timed] = []
    for timed in rows:
        if tick and timed[0] > tick[0][0]:
            yield from _spread_tick(tick, timed[0] - tick[0][0], source)
            tick = []
        tick.append(timed)
    yield from tick


def _spread_tick(tick: list[_Timed], length_s: float, source: random.Random) -> Iterator[_Timed]:
    offsets = sorted(source.random() * length_s for _ in tick)
    for offset_s, (at_s, copy, row) in zip(offsets, tick, strict=True):
        yield at_s + offset_s, copy, row

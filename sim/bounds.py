"""What no policy could exceed on the traffic of a replay, in the engine's blocks.

The oracle does the work (sim/oracle); this hands it the arrivals as they are replayed: cut,
scaled, isolated, in engine blocks. Bounds on prompts only: where the trace names the blocks of
answers, an engine may exceed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from sim.oracle.bounds import by_session, by_tenant, pooled
from sim.oracle.reuse import ReuseReader
from sim.traces.row import TraceRow
from sim.workload import Arrival


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Hit blocks among the requests that are counted, the last token of a prompt never cached.

    `infinite`: a cache that never evicts. `session`: one per session, what perfect stickiness
    reaches. `tenant`: one per tenant. `pooled_*`: one pool of all the fleet's blocks, over all
    requests, so None after a warm-up.
    """

    references: int
    infinite_hit_blocks: int
    session_hit_blocks: int | None
    tenant_hit_blocks: int | None
    pooled_blocks: int
    pooled_lru_hit_blocks: int | None
    pooled_belady_hit_blocks: int | None


class BoundsReader:
    """Bounds of one stream of arrivals, for any fleet; memory per request and distinct block."""

    def __init__(self, arrivals: Iterable[Arrival], *, block_size: int) -> None:
        """Read the stream once."""
        shared = ReuseReader(block_size=block_size)
        sessions = ReuseReader(block_size=block_size, namespace=by_session)
        tenants = ReuseReader(block_size=block_size, namespace=by_tenant)
        self._reuse = shared.reuse
        self._hits: dict[str, list[int]] = {"infinite": [], "session": [], "tenant": []}
        self._has_sessions = False
        tenant_names: set[str] = set()
        for arrival, row in as_rows(arrivals):
            usable = (arrival.num_prompt_tokens - 1) // block_size
            self._has_sessions |= arrival.session is not None
            tenant_names.add(arrival.tenant)
            for name, reader in (
                ("infinite", shared),
                ("session", sessions),
                ("tenant", tenants),
            ):
                self._hits[name].append(min(usable, reader.add(row)))
        self._has_tenants = len(tenant_names) > 1

    def bounds(self, *, replicas: int, blocks: int, counted: Callable[[int], bool]) -> Bounds:
        """Return the bounds of a fleet; `counted` says which requests count, by number."""
        numbers = [i for i in range(self._reuse.num_rows) if counted(i)]
        hits = {name: sum(map(by_row.__getitem__, numbers)) for name, by_row in self._hits.items()}
        capacity = None
        if len(numbers) == self._reuse.num_rows:
            capacity = pooled(self._reuse, replicas=replicas, blocks=blocks)
        return Bounds(
            references=sum(self._reuse.num_blocks[i] for i in numbers),
            infinite_hit_blocks=hits["infinite"],
            session_hit_blocks=hits["session"] if self._has_sessions else None,
            tenant_hit_blocks=hits["tenant"] if self._has_tenants else None,
            pooled_blocks=replicas * blocks,
            pooled_lru_hit_blocks=capacity.lru_hit_blocks if capacity else None,
            pooled_belady_hit_blocks=capacity.belady_hit_blocks if capacity else None,
        )


def as_rows(arrivals: Iterable[Arrival]) -> Iterator[tuple[Arrival, TraceRow]]:
    """Describe arrivals as the oracle reads rows; a block's id is the number in its hash."""
    for arrival in arrivals:
        yield (
            arrival,
            TraceRow(
                line=arrival.line,
                arrival_s=arrival.at_s,
                input_length=arrival.num_prompt_tokens,
                output_length=arrival.num_output_tokens,
                hash_ids=tuple(int.from_bytes(block, "big") for block in arrival.hashes),
                session_id=arrival.session,
                tenant=arrival.tenant,
            ),
        )

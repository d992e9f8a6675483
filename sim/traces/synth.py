"""More traffic like a recorded one: its prefix tree, drawn from anew.

The tree is what several requests share; a path in it is drawn by drawing the request that took it,
from the same part of the trace, so that reuse stays about as near in time as it was. Behind its
shared path every request gets blocks of its own. The hits of an infinite cache come out as in the
source; small caches hit somewhat more, since a path that is drawn twice may be so in short order.
Sessions are not kept: their turns are drawn independently.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sim.traces.errors import TraceError
from sim.traces.format import ChainIds
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import Trace

NEIGHBOURHOOD = 0.1
"""A request is drawn from this share of the trace before and after the same point of it."""


class SynthPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to draw.

    `root_multiplier` copies of the whole tree share nothing, and a request picks one of them;
    `prefix_multiplier` stretches the shared paths, `prompt_multiplier` what follows them.
    `num_requests` defaults to as many as the source has, over the same time.
    """

    seed: int = 0
    num_requests: int | None = None
    root_multiplier: int = 1
    prefix_multiplier: float = 1.0
    prompt_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A source request: the blocks that it shares with others, and its tokens behind them.

    `num_own_tokens` is negative where the last shared block is partial.
    """

    row: TraceRow
    shared: tuple[int, ...]
    num_own_tokens: int


class Synthesizer:
    """Holds the shared paths of a trace; rows are drawn as they are asked for."""

    def __init__(self, trace: Trace, plan: SynthPlan) -> None:
        """Read the trace twice; TraceError when it has no hash_ids or no rows."""
        size = trace.header.block_size
        if size is None:
            raise TraceError(trace.path, "cannot resample prefixes: the trace has no hash_ids")
        references: Counter[int] = Counter()
        for row in trace.rows():
            references.update(row.hash_ids or ())
        self._source = [_cut(row, references, size) for row in trace.rows()]
        if not self._source:
            raise TraceError(trace.path, "cannot resample prefixes: the trace has no rows")
        self._plan = plan
        self._block_size = size
        self.header: TraceHeader = msgspec.structs.replace(
            trace.header,
            lengths="exact",
            source=f"synthetic, after {trace.header.source or trace.path.name}",
        )

    def rows(self) -> Iterator[TraceRow]:
        """Yield the drawn requests in order of arrival; the same for the same plan."""
        rng = random.Random(self._plan.seed)
        ids = ChainIds()
        for line, (position, arrival_s) in enumerate(self._arrivals(rng), start=1):
            drawn = self._source[self._near(position, rng)]
            copy = rng.randrange(self._plan.root_multiplier)
            yield self._row(line, arrival_s, drawn, copy, ids)

    def _arrivals(self, rng: random.Random) -> list[tuple[int, float]]:
        """Spread arrivals over the source's time: (position in the source, time) in order."""
        num_source = len(self._source)
        num_requests = self._plan.num_requests or num_source
        spread = []
        for number in range(num_requests):
            position = number * num_source // num_requests
            start_s = self._source[position].row.arrival_s
            end_s = self._source[min(position + 1, num_source - 1)].row.arrival_s
            spread.append((position, start_s + rng.random() * (end_s - start_s)))
        return sorted(spread, key=lambda arrival: arrival[1])

    def _near(self, position: int, rng: random.Random) -> int:
        reach = int(NEIGHBOURHOOD * len(self._source))
        first = max(position - reach, 0)
        last = min(position + reach, len(self._source) - 1)
        return rng.randint(first, last)

    def _row(
        self, line: int, arrival_s: float, drawn: _Drawn, copy: int, ids: ChainIds
    ) -> TraceRow:
        plan, size = self._plan, self._block_size
        keys = _stretched(drawn.shared, plan.prefix_multiplier)
        num_own_tokens = drawn.num_own_tokens
        if num_own_tokens > 0:
            num_own_tokens = round(num_own_tokens * plan.prompt_multiplier)
        input_length = max(len(keys) * size + num_own_tokens, 1)
        num_blocks = self.header.num_blocks(input_length) or 0
        own = [("own", line, index) for index in range(num_blocks - len(keys))]
        return TraceRow(
            line=line,
            arrival_s=arrival_s,
            input_length=input_length,
            output_length=drawn.row.output_length,
            hash_ids=ids.extend(copy, [*keys[:num_blocks], *own]),
            tenant=drawn.row.tenant,
            model=drawn.row.model,
            priority=drawn.row.priority,
        )


def _cut(row: TraceRow, references: Counter[int], block_size: int) -> _Drawn:
    ids = row.hash_ids or ()
    # A chain's blocks are never referenced more often than those before them.
    num_shared = sum(references[block] > 1 for block in ids)
    num_own_tokens = row.input_length - num_shared * block_size
    return _Drawn(row, ids[:num_shared], num_own_tokens)


def _stretched(shared: tuple[int, ...], multiplier: float) -> list[object]:
    """Give each block as many keys as lie in its place of the stretched path."""
    return [
        (block, part)
        for depth, block in enumerate(shared)
        for part in range(round((depth + 1) * multiplier) - round(depth * multiplier))
    ]

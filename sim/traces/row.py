"""What a trace says: one header about the file, one row per request.

Rows are the same whatever format they were read from. Nothing here knows formats, files or the
order of rows.
"""

from __future__ import annotations

from typing import Literal

import msgspec

HashScope = Literal["global", "local"]
Tail = Literal["ceil", "floor"]
TimeUnit = Literal["ms", "s"]
Lengths = Literal["exact", "approximate"]
Outcome = Literal["answered", "refused", "failed", "cancelled"]

NUM_MS_PER_S = 1000


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a canonical trace: what the rows below it mean.

    `block_size` is in tokens, None where a trace has lengths only. `hash_scope` says whether equal
    ids of two sessions mean equal blocks; rows in memory are always global. `tail` says whether a
    partial last block has an id. `time_unit` is that of the file; rows in memory are in seconds.
    `lengths` is approximate where lengths were not counted by the tokenizer that made the blocks:
    then the number of ids may differ by one from what length and tail give.
    """

    schema: Literal["kvtrace/1"] = "kvtrace/1"
    block_size: int | None = None
    hash_scope: HashScope = "global"
    tail: Tail = "floor"
    time_unit: TimeUnit = "ms"
    lengths: Lengths = "exact"
    source: str = ""
    licence: str = ""

    def num_blocks(self, input_length: int) -> int | None:
        """Return how many ids a prompt of so many tokens has; None without blocks."""
        if self.block_size is None:
            return None
        whole, rest = divmod(input_length, self.block_size)
        return whole + (1 if rest and self.tail == "ceil" else 0)


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    `line` is its line in the file, for errors. `arrival_s` counts from the trace's own zero.
    `hash_ids` is the prompt's chain, one id per block, an id standing for its whole prefix; None
    where the trace has no prefix information. `delay_s` is the think time after the answer to
    `parent_id`. `output_hash_ids` are the further blocks that prompt and output fill together. The
    last fields come from a gateway's recording: isolation group, which client salt, what became
    of the request.
    """

    line: int
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None
    request_id: str | None = None
    session_id: str | None = None
    parent_id: str | None = None
    delay_s: float | None = None
    tenant: str | None = None
    model: str | None = None
    priority: int = 0
    output_hash_ids: tuple[int, ...] | None = None
    group: str | None = None
    client_salt: str | None = None
    outcome: Outcome | None = None

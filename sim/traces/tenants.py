"""Tenants for a trace that has none: drawn by weight, one per session or per shared prefix.

Weights are given, or those of ServeGen's clients (one CSV file each: start, rate, cv, pattern and
two more per window of 600 s). What is drawn is the tenant of a whole session or prefix, never of
one request of it, so reuse stays within a tenant; shares of requests follow the weights only as
far as sessions are alike.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sim.traces.errors import TraceError
from sim.traces.format import ChainIds
from sim.traces.row import TraceRow
from sim.traces.trace import Trace

Unit = Literal["session", "root", "branch"]

WINDOW_S = 600
_FILE = "chunk-*-trace.csv"
_NUM_COLUMNS = 6
# Where more requests than this share their first block, it tells no tenants apart.
MAX_COMMON_ROOT = 0.5


def servegen_weights(folder: Path) -> dict[str, float]:
    """Return each client's expected number of requests, "client-N" by file, 0 left out.

    Raises TraceError when the folder has no client files or one cannot be read.
    """
    weights = {}
    for path in sorted(folder.glob(_FILE), key=lambda path: int(path.name.split("-")[1])):
        if weight := _client_weight(path):
            weights[f"client-{path.name.split('-')[1]}"] = weight
    if not weights:
        raise TraceError(folder, f"no ServeGen client here ({_FILE} with a rate above 0)")
    return weights


def _client_weight(path: Path) -> float:
    weight = 0.0
    with path.open(newline="") as stream:
        for number, cells in enumerate(csv.reader(stream), start=1):
            if len(cells) != _NUM_COLUMNS:
                raise TraceError(path, f"{len(cells)} columns instead of 6", line=number)
            try:
                weight += float(cells[1]) * WINDOW_S
            except ValueError as error:
                raise TraceError(path, f"rate: {error}", line=number) from None
    return weight


def largest(weights: Mapping[str, float], num_tenants: int) -> dict[str, float]:
    """Return the tenants of most weight; equal ones by name."""
    ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    return dict(ranked[:num_tenants])


class TenantOverlay(msgspec.Struct, frozen=True, kw_only=True):
    """How to give a trace tenants; with `isolated`, ids of two tenants are never equal."""

    weights: dict[str, float]
    seed: int = 0
    unit: Unit
    isolated: bool = False

    def rows(self, trace: Trace) -> Iterator[TraceRow]:
        """Yield the trace's rows with tenants; TraceError for a row that has no such unit."""
        rng = random.Random(self.seed)
        names, weights = list(self.weights), list(self.weights.values())
        tenants: dict[object, str] = {}
        ids = ChainIds()
        for row in trace.rows():
            unit = _unit_of(trace, row, self.unit)
            if unit not in tenants:
                (tenants[unit],) = rng.choices(names, weights)
            tenant = tenants[unit]
            if self.isolated and row.hash_ids is not None:
                row = _isolated(row, tenant, ids)
            yield msgspec.structs.replace(row, tenant=tenant)


def choose_unit(trace: Trace) -> Unit:
    """Return the unit that suits a trace: sessions where it has them, else what prompts share.

    Reads the trace once. Raises TraceError when it has neither sessions nor hash_ids.
    """
    roots: dict[int, int] = {}
    num_rows = 0
    for row in trace.rows():
        if row.session_id is not None:
            return "session"
        num_rows += 1
        for root in (row.hash_ids or ())[:1]:
            roots[root] = roots.get(root, 0) + 1
    if not roots:
        raise TraceError(trace.path, "no tenants to draw: neither session_id nor hash_ids")
    return "branch" if max(roots.values()) > MAX_COMMON_ROOT * num_rows else "root"


def _unit_of(trace: Trace, row: TraceRow, unit: Unit) -> object:
    """Return what decides a row's tenant; a prompt too short to have it decides for itself."""
    if unit == "session":
        if row.session_id is None:
            raise TraceError(trace.path, "the row has no session_id", line=row.line)
        return row.session_id
    depth = 0 if unit == "root" else 1
    ids = row.hash_ids or ()
    return ids[depth] if len(ids) > depth else ("line", row.line)


def _isolated(row: TraceRow, tenant: str, ids: ChainIds) -> TraceRow:
    """Salt a row's ids: what an isolated tenant's cache would tell apart."""
    prompt = row.hash_ids or ()
    chain = ids.extend(tenant, prompt + (row.output_hash_ids or ()))
    output = None if row.output_hash_ids is None else chain[len(prompt) :]
    return msgspec.structs.replace(row, hash_ids=chain[: len(prompt)], output_hash_ids=output)

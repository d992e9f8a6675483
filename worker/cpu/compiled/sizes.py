"""Sizes that compiled code and whoever prepares its memory agree on; no numba is needed to know.

Stages are numbered through a step: the first, those of each layer, the last.
"""

from __future__ import annotations

from worker.cpu.compiled.vector_code import LANES

STAGE_BYTES = 128
"""Of counters per stage: units claimed, and at half of it units done, each in a line of cache."""

FIRST_STAGES = 1
STAGES_PER_LAYER = 8
LAST_STAGES = 2

FEW_TOKENS = 4
"""Up to so many, a norm is computed sooner by every thread than shared out and waited for."""

PANEL = 3 * LANES
"""Columns computed at a time: a multiple of every tile's columns, and of a vector."""

TILE_FLOATS = 16
"""Room for the results of a tile."""

CHUNK = 64
"""Keys whose scores are held at a time, rounded to whole blocks and vectors."""

QUERY_ROWS = 24
"""Rows of queries (tokens times query heads of a KV head) that are attended at a time."""

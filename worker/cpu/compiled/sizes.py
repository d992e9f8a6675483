"""Sizes that compiled code and whoever prepares its memory agree on; no numba is needed to know.

Stages are numbered through a step: the first, those of each layer, the last.
"""

from __future__ import annotations

from worker.cpu.compiled.vector_code import LANES

COUNTER_BYTES = 64
"""A counter has a line of cache of its own."""

MOST_PARTS = 8
"""The units of a stage are claimed part by part, one part per thread, but no more than these."""

FIRST_STAGES = 1
STAGES_PER_LAYER = 8
LAST_STAGES = 2

FEW_TOKENS = 4
"""Up to so many, a norm is computed sooner by every thread than shared out and waited for."""

PANEL = 3 * LANES
"""Columns computed at a time: a multiple of every tile's columns, and of a vector."""

PAIR_COLUMNS, PAIR_ROWS = 4 * LANES, 96
"""Of a unit of many rows, where pairs are multiplied: multiples of the largest tile's."""

STREAMS = 8
"""The most places that a weight is read at side by side: columns of the widest tile."""

TILE_FLOATS = 16
"""Room for the results of a tile."""

CHUNK = 64
"""Keys whose scores are held at a time, rounded to whole blocks and vectors."""

QUERY_ROWS, PAIR_QUERY_ROWS = 24, 48
"""Rows of queries (tokens times query heads of a KV head) that are attended at a time.

More where pairs are multiplied: keys and values are brought into panels each time.
"""

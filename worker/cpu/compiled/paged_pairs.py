"""Causal attention like that of paged.py, where a CPU multiplies pairs of bfloat16.

Keys and values of a chunk are brought into panels once, for all queries that look at it. Queries
and the weights of values are rounded to bfloat16, sums and the softmax are float32.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call4, pointer
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.paged import ask_for_block, begin, end_rows, soften
from worker.cpu.compiled.pair_tiles import TURN, ZIP
from worker.cpu.compiled.pairs import multiply_panels, round_to_half
from worker.cpu.compiled.tiles import PAIRS
from worker.cpu.compiled.vector_code import LANES


@inner
def attend_pairs(  # type: ignore[no-untyped-def]
    queries, num_rows, first_position, heads, cached, scratch, halves, tiles
):
    """Do what paged.attend does with a cache in bfloat16; the result replaces the queries.

    halves are addresses of bfloat16: (queries [rows, head_dim], weights [rows, chunk], tokens
    [chunk, head_dim], panels of keys and of values, each as large as tokens).
    """
    keys, values, stride, table, block_size = cached
    scores, out, largest, totals, _ = scratch
    rounded, weights, tokens, key_panels, value_panels = halves
    head_dim, width = out.shape[1], scores.shape[1]
    block_bytes = block_size * stride * 2
    zero, one = np.int64(0), np.int64(1)
    begin(num_rows, out, largest, totals)
    round_to_half(queries.ctypes.data, num_rows * head_dim, rounded, tiles)
    end = first_position + (num_rows - 1) // heads + 1
    for start in range(0, end, width):
        visible = min(width, end - start)
        padded = -(-visible // LANES) * LANES
        for at in range(0, visible, block_size):
            place = np.int64(table[(start + at) // block_size]) * block_bytes
            count = min(block_size, visible - at)
            ask_for_block(values, place, np.int64(1), stride, count, head_dim)
            _collect(keys + place, stride, count, head_dim, tokens + at * head_dim * 2)
        _clear(tokens, visible, padded, head_dim)
        for at in range(0, padded, LANES):
            shift = at * head_dim * 2
            call4(tiles[PAIRS + TURN], tokens + shift, head_dim, head_dim, key_panels + shift)
        columns, target = (one, zero, padded), (scores.ctypes.data, width, zero, zero)
        multiply_panels(rounded, num_rows, head_dim, key_panels, columns, target, tiles)
        for row in range(num_rows):
            limit = min(visible, first_position + row // heads + 1 - start)
            soften(scores, row, limit, visible, out, largest, totals, tiles)
            line = scores.ctypes.data + row * width * 4
            round_to_half(line, padded, weights + row * padded * 2, tiles)
        for at in range(0, visible, block_size):
            place = np.int64(table[(start + at) // block_size]) * block_bytes
            count = min(block_size, visible - at)
            later = start + width + at
            if later < end:
                following = np.int64(table[later // block_size]) * block_bytes
                ask_for_block(keys, following, np.int64(1), stride, block_size, head_dim)
            _collect(values + place, stride, count, head_dim, tokens + at * head_dim * 2)
        for at in range(0, padded, 2):
            pair = tokens + at * head_dim * 2
            call4(tiles[PAIRS + ZIP], pair, head_dim, value_panels + at * LANES * 2, LANES * padded)
        columns, target = (one, zero, head_dim), (out.ctypes.data, head_dim, zero, one)
        multiply_panels(weights, num_rows, padded, value_panels, columns, target, tiles)
    end_rows(queries, num_rows, out, totals)


@inner
def _collect(tokens, stride, count, head_dim, out):  # type: ignore[no-untyped-def]
    """Copy `count` rows [head_dim] that are `stride` apart to an address, without gaps."""
    # By words: a row is whole vectors.
    words = head_dim // 4
    target = carray(pointer(out), (count, words), np.int64)
    source = carray(pointer(tokens), (count, stride // 4), np.int64)
    for token in range(count):
        for i in range(words):
            target[token, i] = source[token, i]


@inner
def _clear(tokens, first, end, head_dim):  # type: ignore[no-untyped-def]
    """Set the rows from `first` to `end` to zero: what was never written may be no number."""
    rows = carray(pointer(tokens), (end, head_dim), np.uint16)
    for token in range(first, end):
        for d in range(head_dim):
            rows[token, d] = 0

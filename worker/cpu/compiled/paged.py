"""Causal attention of some queries of one request over the paged cache, read in place.

Keys are visited in chunks that start at fixed positions and every score is summed in one order, so
a row's result depends neither on the queries beside it nor on how its prompt was cut.
"""

from __future__ import annotations

import numpy as np

from worker.cpu.compiled.calls import ask_for, call3, call4, call6, call7
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.tiles import LARGEST, MIX, NUM_STORAGES, SOFTMAX
from worker.cpu.compiled.vector_code import LANES, LINE_BYTES


@inner
def attend(  # type: ignore[no-untyped-def]
    queries, num_rows, first_position, heads, cached, scratch, tiles
):
    """Attend `queries` [num_rows, head_dim], scaled; row i is at first_position + i // heads.

    cached is (keys, values, is_half, stride, table, block_size): addresses of this KV head in block
    0 of a layer, elements between tokens, the request's blocks. The result replaces the queries.
    scratch is (scores [rows, chunk], sums [rows, head_dim], largest [rows], totals [rows], tile).
    """
    keys, values, is_half, stride, table, block_size = cached
    scores, out, largest, totals, tile = scratch
    head_dim, width = out.shape[1], scores.shape[1]
    block_bytes = block_size * stride * (2 if is_half else 4)
    begin(num_rows, out, largest, totals)
    end = first_position + (num_rows - 1) // heads + 1
    for start in range(0, end, width):
        visible = min(width, end - start)
        for at in range(0, visible, block_size):
            block = keys + np.int64(table[(start + at) // block_size]) * block_bytes
            count = min(block_size, visible - at)
            ask_for_block(values, block - keys, is_half, stride, count, head_dim)
            _score(queries, num_rows, block, is_half, stride, count, scores, at, tile, tiles)
        for row in range(num_rows):
            limit = min(visible, first_position + row // heads + 1 - start)
            soften(scores, row, limit, visible, out, largest, totals, tiles)
        for at in range(0, visible, block_size):
            block = values + np.int64(table[(start + at) // block_size]) * block_bytes
            count = min(block_size, visible - at)
            later = start + width + at
            if later < end:
                place = np.int64(table[later // block_size]) * block_bytes
                ask_for_block(keys, place, is_half, stride, block_size, head_dim)
            _mix(scores, at, num_rows, block, is_half, stride, count, out, tiles)
    end_rows(queries, num_rows, out, totals)


@inner
def begin(num_rows, out, largest, totals):  # type: ignore[no-untyped-def]
    """Prepare the sums of some rows: nothing was seen yet."""
    for row in range(num_rows):
        largest[row], totals[row] = -np.inf, 0.0
        for d in range(out.shape[1]):
            out[row, d] = 0.0


@inner
def end_rows(queries, num_rows, out, totals):  # type: ignore[no-untyped-def]
    """Replace the queries by what they have found."""
    for row in range(num_rows):
        share = np.float32(1.0) / totals[row]
        for d in range(out.shape[1]):
            queries[row, d] = out[row, d] * share


@inner
def ask_for_block(tokens, place, is_half, stride, count, head_dim):  # type: ignore[no-untyped-def]
    """Ask for the keys, or the values, of the first `count` tokens of a block, `place` bytes on."""
    size = 2 if is_half else 4
    for token in range(count):
        start = tokens + place + token * stride * size
        for byte in range(0, head_dim * size, LINE_BYTES):
            ask_for(start + byte)


@inner
def _score(queries, num_rows, keys, is_half, stride, count, scores, at, tile, tiles):  # type: ignore[no-untyped-def]
    """Set scores[:, at:at + count] to the products of the queries with the keys of a block."""
    size = 2 if is_half else 4
    depth = queries.shape[1]
    row = 0
    while row < num_rows:
        rows = 3 if num_rows - row >= 3 else 1
        x = queries.ctypes.data + row * depth * 4
        column = 0
        while column < count:
            columns = 4 if count - column >= 4 else 1
            shape = (6 if columns == 4 else 7) if rows == 3 else (8 if columns == 4 else 5)
            place = keys + column * stride * size
            function = tiles[NUM_STORAGES * shape + is_half]
            call6(function, x, depth, place, stride, depth, tile.ctypes.data)
            for r in range(rows):
                for c in range(columns):
                    scores[row + r, at + column + c] = tile[r * columns + c]
            column += columns
        row += rows


@inner
def soften(scores, row, limit, visible, out, largest, totals, tiles):  # type: ignore[no-untyped-def]
    """Turn a row's first `limit` scores into weights, the others into zeros, and rescale `out`.

    One pass of the online softmax (Milakov, Gimelshein 2018).
    """
    padded = -(-visible // LANES) * LANES
    for column in range(max(limit, 0), padded):
        scores[row, column] = -np.inf
    before, previous = largest[row], totals[row]
    line, place = scores.ctypes.data + row * scores.shape[1] * 4, largest.ctypes.data + row * 4
    call3(tiles[LARGEST], line, padded, place)
    call4(tiles[SOFTMAX], line, padded, place, totals.ctypes.data + row * 4)
    top = largest[row]
    if top != before:
        shrink = np.float32(np.exp(before - top))
        previous *= shrink
        for d in range(out.shape[1]):
            out[row, d] *= shrink
    totals[row] += previous


@inner
def _mix(weights, at, num_rows, values, is_half, stride, count, out, tiles):  # type: ignore[no-untyped-def]
    """Add to out the values of a block, weighted by weights[:, at:at + count]."""
    size = 2 if is_half else 4
    width, head_dim = weights.shape[1], out.shape[1]
    row = 0
    while row < num_rows:
        rows = 3 if num_rows - row >= 3 else 1
        p = weights.ctypes.data + (row * width + at) * 4
        d = 0
        while d < head_dim:
            wide = head_dim - d >= 4 * LANES
            shape = (0 if rows == 3 else 2) + (0 if wide else 1)
            place = values + d * size
            o = out.ctypes.data + (row * head_dim + d) * 4
            call7(tiles[MIX + 2 * shape + is_half], p, width, place, stride, count, o, head_dim)
            d += 4 * LANES if wide else LANES
        row += rows

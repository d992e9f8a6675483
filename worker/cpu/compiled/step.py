"""One forward pass of a decoder of the Llama family, run by several threads at once.

Each thread calls `run` with the same record; a stage begins when the one before it is done. The
stages are those of worker.model.llama, over float32 activations. Where tokens are few, threads do
the small stages side by side, each for itself, and wait for each other less often.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import call4, pointer
from worker.cpu.compiled.crew_code import finish, next_unit
from worker.cpu.compiled.inner import inner
from worker.cpu.compiled.paged import attend
from worker.cpu.compiled.paged_pairs import attend_pairs
from worker.cpu.compiled.pairs import (
    multiply_panels,
    pair_streams,
    round_finely,
    round_to_half,
    split_in_halves,
    transform,
)
from worker.cpu.compiled.products import item_bytes, multiply, streams_for
from worker.cpu.compiled.rows import add, embed, normalize, rotate, store
from worker.cpu.compiled.sizes import (
    FEW_TOKENS,
    FIRST_STAGES,
    PAIR_COLUMNS,
    PAIR_ROWS,
    PANEL,
    STAGES_PER_LAYER,
    STREAMS,
    TILE_FLOATS,
)
from worker.cpu.compiled.step_record import LAYER
from worker.cpu.compiled.tiles import NUM_TILES, SILU
from worker.cpu.compiled.vector_code import LANES
from worker.cpu.hadamard import HADAMARD_SIZE

_TOKENS = 4
"""Tokens per unit of the stages that go token by token."""

_COLUMNS = len(LAYER)
_INPUT_NORM, _QKV, _OUT, _GATE_UP, _DOWN, _POST_NORM, _QKV_BIAS, _FIRST_SCALES = np.arange(8)
_SCALES_BEHIND = _FIRST_SCALES - _QKV
"""Where each stands in LAYER; the scales of a product come so many places behind it."""


@inner
def run(step, thread):  # type: ignore[no-untyped-def]
    """Take part in a step as thread number `thread`; return when it is computed."""
    layers = _integers(step.layers, (step.num_layers, _COLUMNS))
    scratch = _thread_scratch(step, thread)
    hidden, inner_size = step.hidden_size, step.inner_size
    normed, gated = hidden + step.num_fine, inner_size + step.num_fine_gated
    heads = step.num_heads * step.head_dim
    fused = heads + 2 * step.num_kv_heads * step.head_dim
    # Numbers by type: numba would compile a version of each function for each literal.
    zero, one = np.int64(0), np.int64(1)
    _embed(step, zero, thread)
    stage = np.int64(FIRST_STAGES)
    for layer in range(step.num_layers):
        own = layers[layer]
        x = _norm(step, stage, (own[_INPUT_NORM], 2 * layer), scratch)
        _project(step, stage + 1, own, _QKV, x, normed, fused, step.qkv, zero, scratch)
        if not step.is_decode:
            _rotate_and_store(step, stage + 2, layer, own[_QKV_BIAS], thread)
        _attend(step, stage + 3, layer, own[_QKV_BIAS], scratch)
        x = step.attended
        _project(step, stage + 4, own, _OUT, x, heads, hidden, step.hidden, one, scratch)
        x = _norm(step, stage + 5, (own[_POST_NORM], 2 * layer + 1), scratch)
        _gate_up(step, stage + 6, own, x, scratch)
        x = step.gated
        _project(step, stage + 7, own, _DOWN, x, gated, hidden, step.hidden, one, scratch)
        stage += STAGES_PER_LAYER
    if step.num_rows:
        x = _norm_rows(step, stage, scratch)
        weight = step.head, step.ends_are_half, zero
        out = step.logits, zero
        _product(step, stage + 1, x, normed, step.num_rows, weight, step.vocab_size, out, scratch)


@inner
def _floats(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer(address), shape, np.float32)


@inner
def _integers(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer(address), shape, np.int64)


@inner
def _units(count, size):  # type: ignore[no-untyped-def]
    return (count + size - 1) // size


@inner
def _thread_scratch(step, thread):  # type: ignore[no-untyped-def]
    """Return ((tile, panel), normed, rest, thread); the second and third are addresses.

    All is this thread's own: what is multiplied, the norms of FEW_TOKENS, what a stage needs
    besides.
    """
    start = step.scratch + thread * step.scratch_floats * 4
    depth = max(step.hidden_size, step.inner_size, step.num_heads * step.head_dim)
    tile = _floats(start, (TILE_FLOATS,))
    panel = _floats(start + TILE_FLOATS * 4, (PANEL * depth,))
    normed = start + TILE_FLOATS * 4 + PANEL * depth * 4
    rest = normed + FEW_TOKENS * (step.hidden_size + step.num_fine) * 4
    return (tile, panel), normed, rest, thread


@inner
def _embed(step, stage, thread):  # type: ignore[no-untyped-def]
    """Set hidden to the embeddings of the tokens."""
    hidden = _floats(step.hidden, (step.num_tokens, step.hidden_size))
    token_ids = _integers(step.token_ids, (step.num_tokens,))
    num_units, done = step.num_tokens, 0
    turn, unit = next_unit(step, stage, thread, 0, num_units)
    while unit < num_units:
        embed(step.embedding, step.ends_are_half, token_ids[unit], hidden[unit])
        done += 1
        turn, unit = next_unit(step, stage, thread, turn, num_units)
    finish(step, stage, done, num_units)


@inner
def _norm(step, stage, norm, scratch):  # type: ignore[no-untyped-def]
    """Return the address of the norms of hidden; of few tokens, every thread has its own.

    norm is (address of its weight, which of the model's norms it is).
    A thread that comes late may read what a later stage writes, but then it finds no unit that
    would need its norms.
    """
    hidden = _floats(step.hidden, (step.num_tokens, step.hidden_size))
    if step.num_tokens <= FEW_TOKENS:
        for token in range(step.num_tokens):
            _norm_row(step, hidden[token], norm, scratch[1], token, scratch)
        return scratch[1]
    num_units, done = _units(step.num_tokens, np.int64(_TOKENS)), 0
    turn, unit = next_unit(step, stage, scratch[3], 0, num_units)
    while unit < num_units:
        for token in range(unit * _TOKENS, min((unit + 1) * _TOKENS, step.num_tokens)):
            _norm_row(step, hidden[token], norm, step.normed, token, scratch)
        done += 1
        turn, unit = next_unit(step, stage, scratch[3], turn, num_units)
    finish(step, stage, done, num_units)
    return step.normed


@inner
def _norm_row(step, row, norm, normed, place, scratch):  # type: ignore[no-untyped-def]
    """Write the norm of a row to row `place` at an address, as products want it."""
    weight, number = norm
    width, num_fine = step.hidden_size, step.num_fine
    weights = _floats(weight, (width,))
    out = normed + place * (width + num_fine) * _item_bytes(step)
    if step.in_pairs:
        channels = _integers(step.fine_channels + number * num_fine * 8, (num_fine,))
        wide = scratch[0][1][:width]
        normalize(row, weights, step.eps, wide)
        round_finely(wide, channels, out, _integers(step.tiles, (NUM_TILES,)))
    else:
        normalize(row, weights, step.eps, _floats(out, (width,)))


@inner
def _project(step, stage, layer, product, x, depth, columns, out, adds, scratch):  # type: ignore[no-untyped-def]
    """Do what _product does, with all tokens and a product of a layer."""
    weight = layer[product], step.storage, layer[product + _SCALES_BEHIND]
    _product(step, stage, x, depth, step.num_tokens, weight, columns, (out, adds), scratch)


@inner
def _product(step, stage, x, depth, num_rows, weight, columns, target, scratch):  # type: ignore[no-untyped-def]
    """Set out [num_rows, columns] to x [num_rows, depth] times a weight, or add it if `adds`.

    weight is (address, storage, address of scales or 0), target is (out, adds).
    """
    out, adds = target
    streams, apart, segment = _streams(step, num_rows, columns)
    num_whole, num_parts = _column_units(streams, apart, segment, columns)
    height = _rows_of_unit(step, num_rows)
    num_units, done = num_parts * _units(num_rows, height), 0
    turn, unit = next_unit(step, stage, scratch[3], 0, num_units)
    while unit < num_units:
        first = unit // num_parts * height
        at, part = _columns_of(unit % num_parts, num_whole, streams, apart, segment, columns)
        rows = x + first * depth * _item_bytes(step), min(height, num_rows - first), depth
        place = out + (first * columns + at) * 4, columns, part[1], adds
        _multiply(step, rows, _from(weight, at, depth), part, place, scratch)
        done += 1
        turn, unit = next_unit(step, stage, scratch[3], turn, num_units)
    finish(step, stage, done, num_units)


@inner
def _multiply(step, rows, weight, part, target, scratch):  # type: ignore[no-untyped-def]
    """Multiply some columns of a weight; rows is (address, rows, depth), see products.multiply."""
    tiles = _integers(step.tiles, (NUM_TILES,))
    x, num_rows, depth = rows
    if step.in_pairs:
        multiply_panels(x, num_rows, depth, weight[0], part, target, tiles)
    else:
        multiply(x, num_rows, depth, weight, part, target, tiles, scratch[0])


@inner
def _item_bytes(step):  # type: ignore[no-untyped-def]
    """Return the bytes of a number that is about to be multiplied."""
    return 2 if step.in_pairs else 4


@inner
def _rows_of_unit(step, num_rows):  # type: ignore[no-untyped-def]
    """Return how many rows a unit of a product has: all, or so many that they stay in the cache."""
    return np.int64(PAIR_ROWS if step.in_pairs else max(num_rows, np.int64(1)))


@inner
def _streams(step, num_rows, columns):  # type: ignore[no-untyped-def]
    """Return how columns are shared out: (streams, columns of each, columns of each in a unit).

    What is left over by streams of whole vectors is a unit for itself.
    """
    if step.in_pairs:
        streams = np.int64(pair_streams(num_rows))
        segment = np.int64(PAIR_COLUMNS if streams == 1 else LANES)
    else:
        streams = np.int64(streams_for(num_rows))
        segment = np.int64(PANEL // streams if streams in (1, STREAMS) else LANES)
    return streams, columns // (streams * LANES) * LANES, segment


@inner
def _column_units(streams, apart, segment, columns):  # type: ignore[no-untyped-def]
    """Return (units of all streams, all units)."""
    num_whole = _units(apart, segment)
    return num_whole, num_whole + (1 if columns > streams * apart else 0)


@inner
def _columns_of(unit, num_whole, streams, apart, segment, columns):  # type: ignore[no-untyped-def]
    """Return the first column of a unit, and which it has: (streams, apart, count)."""
    if unit < num_whole:
        at = unit * segment
        return at, (streams, apart, min(segment, apart - at))
    at = streams * apart
    return at, (np.int64(1), np.int64(0), columns - at)


@inner
def _from(weight, column, depth):  # type: ignore[no-untyped-def]
    """Return a weight without its columns before `column`."""
    address, storage, scales = weight
    factors = scales + column * 4 if scales else scales
    return address + column * depth * item_bytes(storage), storage, factors


@inner
def _rotate_and_store(step, stage, layer, bias, thread):  # type: ignore[no-untyped-def]
    """Finish queries, keys and values, and write keys and values to the cache."""
    num_units, done = _units(step.num_tokens, np.int64(_TOKENS)), 0
    turn, unit = next_unit(step, stage, thread, 0, num_units)
    while unit < num_units:
        for token in range(unit * _TOKENS, min((unit + 1) * _TOKENS, step.num_tokens)):
            for kv_head in range(step.num_kv_heads):
                _finish_head(step, layer, token, kv_head, bias)
        done += 1
        turn, unit = next_unit(step, stage, thread, turn, num_units)
    finish(step, stage, done, num_units)


@inner
def _finish_head(step, layer, token, kv_head, bias):  # type: ignore[no-untyped-def]
    """Do what follows the product for one KV head of a token and the queries that share it.

    The bias is added, queries and key are rotated, queries scaled, key and value stored.
    """
    num_heads, kv_heads, head_dim = step.num_heads, step.num_kv_heads, step.head_dim
    all_heads, group = num_heads + 2 * kv_heads, num_heads // kv_heads
    heads = _floats(step.qkv + token * all_heads * head_dim * 4, (all_heads, head_dim))
    key, value = num_heads + kv_head, num_heads + kv_heads + kv_head
    position = _integers(step.positions, (step.num_tokens,))[token]
    rotary = _floats(step.rotary, (2, step.num_positions, head_dim // 2))
    cos, sin = rotary[0, position], rotary[1, position]
    scale = np.float32(1.0 / np.sqrt(np.float64(head_dim)))
    if step.in_pairs:
        scale /= np.float32(HADAMARD_SIZE)
    if bias:
        offsets = _floats(bias, (all_heads, head_dim))
        for h in range(kv_head * group, (kv_head + 1) * group):
            add(heads[h], offsets[h])
        add(heads[key], offsets[key])
        add(heads[value], offsets[value])
    for h in range(kv_head * group, (kv_head + 1) * group):
        rotate(heads[h], cos, sin)
        for d in range(head_dim):
            heads[h, d] *= scale
    rotate(heads[key], cos, sin)
    if step.in_pairs:
        # Scores stay (all keys move alike), but their rounding no longer grows with a few channels.
        tiles = _integers(step.tiles, (NUM_TILES,))
        transform(heads[kv_head * group : (kv_head + 1) * group], tiles)
        transform(heads[key : key + 1], tiles)
        row = step.key_offsets + (layer * kv_heads + kv_head) * head_dim * 4
        add(heads[key], _floats(row, (head_dim,)))
    size = 2 if step.cache_is_half else 4
    at = _place(step, layer, token, position) + kv_head * head_dim * size
    store(heads[key], step.keys + at, step.cache_is_half)
    store(heads[value], step.values + at, step.cache_is_half)


@inner
def _place(step, layer, token, position):  # type: ignore[no-untyped-def]
    """Return where a token's keys, and its values, begin in those of the cache, in bytes."""
    table = _table(step, _integers(step.requests, (step.num_tokens,))[token])
    slot = np.int64(table[position // step.block_size]) * step.block_size
    slot += position % step.block_size
    size = 2 if step.cache_is_half else 4
    return layer * step.layer_bytes + slot * step.num_kv_heads * step.head_dim * size


@inner
def _table(step, request):  # type: ignore[no-untyped-def]
    start = step.tables + request * step.table_width * 4
    return carray(pointer(start), (step.table_width,), np.int32)


@inner
def _attend(step, stage, layer, bias, scratch):  # type: ignore[no-untyped-def]
    """Set attended; a unit is one segment under one KV head, longest contexts first.

    Where no token sees another of this step, a unit finishes its own queries, key and value first.
    """
    num_units = step.num_segments * step.num_kv_heads
    buffers = _attention_scratch(step, scratch[2])
    segments = _integers(step.segments, (step.num_segments, 2))
    done = 0
    turn, unit = next_unit(step, stage, scratch[3], 0, num_units)
    while unit < num_units:
        segment = step.num_segments - 1 - unit // step.num_kv_heads
        first, count = segments[segment, 0], segments[segment, 1]
        kv_head = unit % step.num_kv_heads
        if step.is_decode:
            _finish_head(step, layer, first, kv_head, bias)
        _attend_segment(step, layer, first, count, kv_head, buffers)
        done += 1
        turn, unit = next_unit(step, stage, scratch[3], turn, num_units)
    finish(step, stage, done, num_units)


@inner
def _attention_scratch(step, start):  # type: ignore[no-untyped-def]
    """Return (queries, (scores, sums, largest, totals, tile), addresses) in a thread's own memory.

    The addresses are those that paged_pairs works in.
    """
    rows, width, head_dim = step.query_rows, step.chunk, step.head_dim
    queries = _floats(start, (rows, head_dim))
    sums = _floats(start + rows * head_dim * 4, (rows, head_dim))
    rest = start + 2 * rows * head_dim * 4
    scores = _floats(rest, (rows, width))
    rest += rows * width * 4
    largest, totals = _floats(rest, (rows,)), _floats(rest + rows * 4, (rows,))
    tile = _floats(rest + rows * 8, (TILE_FLOATS,))
    rounded = rest + rows * 8 + TILE_FLOATS * 4
    weights = rounded + rows * head_dim * 2
    tokens = weights + rows * width * 2
    size = width * head_dim * 2
    halves = rounded, weights, tokens, tokens + size, tokens + 2 * size
    return queries, (scores, sums, largest, totals, tile), halves


@inner
def _attend_segment(step, layer, first, count, kv_head, buffers):  # type: ignore[no-untyped-def]
    queries, scratch, halves = buffers
    num_heads, kv_heads, head_dim = step.num_heads, step.num_kv_heads, step.head_dim
    group = num_heads // kv_heads
    qkv = _floats(step.qkv, (step.num_tokens, num_heads + 2 * kv_heads, head_dim))
    position = _integers(step.positions, (step.num_tokens,))[first]
    request = _integers(step.requests, (step.num_tokens,))[first]
    for i in range(count * group):
        for d in range(head_dim):
            queries[i, d] = qkv[first + i // group, kv_head * group + i % group, d]
    is_half = step.cache_is_half
    offset = layer * step.layer_bytes + kv_head * head_dim * (2 if is_half else 4)
    keys, values, stride = step.keys + offset, step.values + offset, kv_heads * head_dim
    rows, table = count * group, _table(step, request)
    tiles = _integers(step.tiles, (NUM_TILES,))
    if step.in_pairs:
        halved = keys, values, stride, table, step.block_size
        attend_pairs(queries, rows, position, group, halved, scratch, halves, tiles)
        for i in range(rows):
            head = (first + i // group) * num_heads + kv_head * group + i % group
            place = step.attended + head * head_dim * 2
            round_to_half(queries[i].ctypes.data, head_dim, place, tiles)
    else:
        cached = keys, values, is_half, stride, table, step.block_size
        attend(queries, rows, position, group, cached, scratch, tiles)
        out = _floats(step.attended, (step.num_tokens, num_heads, head_dim))
        for i in range(rows):
            for d in range(head_dim):
                out[first + i // group, kv_head * group + i % group, d] = queries[i, d]


@inner
def _gate_up(step, stage, layer, x, scratch):  # type: ignore[no-untyped-def]
    """Set gated to silu(gate) * up; gates are the first inner_size columns of the weight."""
    tokens, inner_size = step.num_tokens, step.inner_size
    depth = step.hidden_size + step.num_fine
    weight = layer[_GATE_UP], step.storage, layer[_GATE_UP + _SCALES_BEHIND]
    streams, apart, segment = _streams(step, tokens, inner_size)
    segment, adds = max(segment, np.int64(LANES)), np.int64(0)
    num_whole, num_parts = _column_units(streams, apart, segment, inner_size)
    height = _rows_of_unit(step, tokens)
    num_units, done = num_parts * _units(tokens, height), 0
    turn, unit = next_unit(step, stage, scratch[3], 0, num_units)
    while unit < num_units:
        first = unit // num_parts * height
        at, part = _columns_of(unit % num_parts, num_whole, streams, apart, segment, inner_size)
        rows = x + first * depth * _item_bytes(step), min(height, tokens - first), depth
        source, width = _from(weight, at, depth), part[0] * part[2]
        gate = scratch[2], width, part[2], adds
        _multiply(step, rows, source, part, gate, scratch)
        up = scratch[2] + rows[1] * width * 4, width, part[2], adds
        _multiply(step, rows, _from(source, inner_size, depth), part, up, scratch)
        _put_gated(step, first, rows[1], at, part, (gate[0], up[0]))
        done += 1
        turn, unit = next_unit(step, stage, scratch[3], turn, num_units)
    finish(step, stage, done, num_units)


@inner
def _put_gated(step, first, num_rows, column, part, found):  # type: ignore[no-untyped-def]
    """Set some rows and columns of gated, as products want them, to silu(gate) * up."""
    tiles = _integers(step.tiles, (NUM_TILES,))
    streams, apart, count = part
    gates, ups = found
    depth = step.inner_size + step.num_fine_gated
    for row in range(num_rows):
        for stream in range(streams):
            behind = (row * streams + stream) * count * 4
            gate, up = gates + behind, ups + behind
            channel = column + stream * apart
            line = step.gated + (first + row) * depth * _item_bytes(step)
            target = line + channel * _item_bytes(step)
            if step.in_pairs:
                call4(tiles[SILU], gate, up, gate, count)
                fine = min(max(step.num_fine_gated - channel, 0), count)
                if fine:
                    rest = line + (step.inner_size + channel) * 2
                    split_in_halves(gate, fine, target, rest, tiles)
                if fine < count:
                    round_to_half(gate + fine * 4, count - fine, target + fine * 2, tiles)
            else:
                call4(tiles[SILU], gate, up, target, count)


@inner
def _norm_rows(step, stage, scratch):  # type: ignore[no-untyped-def]
    """Return the address of the final norms of the tokens that are sampled, as _norm does."""
    hidden = _floats(step.hidden, (step.num_tokens, step.hidden_size))
    norm = step.final_norm, 2 * step.num_layers
    rows = _integers(step.rows, (step.num_rows,))
    if step.num_rows <= FEW_TOKENS:
        for row in range(step.num_rows):
            _norm_row(step, hidden[rows[row]], norm, scratch[1], row, scratch)
        return scratch[1]
    num_units, done = step.num_rows, 0
    turn, unit = next_unit(step, stage, scratch[3], 0, num_units)
    while unit < num_units:
        _norm_row(step, hidden[rows[unit]], norm, step.normed, unit, scratch)
        done += 1
        turn, unit = next_unit(step, stage, scratch[3], turn, num_units)
    finish(step, stage, done, num_units)
    return step.normed

"""What is done to one token at a time: look-up, norm, rotary embedding, storing keys and values.

Activations are float32; what is read and written elsewhere may be bfloat16, at an address.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from worker.cpu.compiled.calls import pointer
from worker.cpu.compiled.inner import inner, inner_sums
from worker.cpu.compiled.products import widen


@inner
def embed(table, is_half, token_id, out):  # type: ignore[no-untyped-def]
    """Set out [width] to a row of an embedding table."""
    width = out.shape[0]
    if is_half:
        widen(table + token_id * width * 2, np.int64(1), out.ctypes.data, width)
    else:
        row = carray(pointer(table + token_id * width * 4), (width,), np.float32)
        for i in range(width):
            out[i] = row[i]


@inner_sums
def normalize(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """Set out to x over its root mean square, times weight (Zhang, Sennrich 2019)."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.float32(np.sqrt(total / np.float32(x.shape[0]) + np.float32(eps)))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@inner
def add(numbers, offsets):  # type: ignore[no-untyped-def]
    """Add offsets [width] to numbers [width] in place."""
    for i in range(numbers.shape[0]):
        numbers[i] += offsets[i]


@inner
def rotate(head, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate a head [head_dim] in place by cos, sin [head_dim / 2]."""
    half = cos.shape[0]
    for i in range(half):
        low, high = head[i], head[half + i]
        head[i] = low * cos[i] - high * sin[i]
        head[half + i] = high * cos[i] + low * sin[i]


@inner
def store(source, target, is_half):  # type: ignore[no-untyped-def]
    """Write source [width] to an address, rounded to the nearest even in bfloat16."""
    width = source.shape[0]
    if is_half:
        words = carray(pointer(source.ctypes.data), (width,), np.uint32)
        halves = carray(pointer(target), (width,), np.uint16)
        for i in range(width):
            word = words[i]
            rounded = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
            if source[i] != source[i]:
                rounded = word | np.uint32(0x400000)
            halves[i] = np.uint16(rounded >> np.uint32(16))
    else:
        numbers = carray(pointer(target), (width,), np.float32)
        for i in range(width):
            numbers[i] = source[i]

"""The innermost loops against numpy, called by address as compiled code calls them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from worker.cpu.compiled.forward import panels_of
from worker.cpu.compiled.pair_tiles import HADAMARD, PANEL_SHAPES, ROUND, SPLIT, TURN, ZIP
from worker.cpu.compiled.products import FLOAT8
from worker.cpu.compiled.tile_library import tile_addresses
from worker.cpu.compiled.tiles import (
    DOT_SHAPES,
    LARGEST,
    MIX,
    MIX_SHAPES,
    NUM_STORAGES,
    PAIRS,
    SILU,
    SOFTMAX,
    STORAGES,
)
from worker.cpu.compiled.vector_code import LANES, MULTIPLIES_PAIRS, Storage
from worker.cpu.hadamard import HADAMARD_SIZE, hadamard

Array = npt.NDArray[np.float32]
RNG = np.random.default_rng(0)
needs_pairs = pytest.mark.skipif(
    not MULTIPLIES_PAIRS, reason="this CPU does not multiply pairs of bfloat16"
)


def call(index: int, *arguments: int) -> None:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))
    function(int(tile_addresses(None)[index]))(*arguments)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def stored(values: Array, storage: str) -> tuple[npt.NDArray[np.generic], Array]:
    """Return values as they are stored, and what they stand for."""
    tensor = torch.from_numpy(values)
    match storage:
        case "float32":
            return values, values
        case "bfloat16":
            narrow, bits = tensor.bfloat16(), torch.int16
        case "int8":
            narrow, bits = (tensor * 20).round().to(torch.int8), torch.int8
        case _:
            narrow, bits = tensor.to(torch.float8_e4m3fn), torch.int8
    return narrow.view(bits).numpy(), narrow.float().numpy()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("vectors", [1, 2, 5])
def test_dot_tiles(vectors: int, storage: Storage) -> None:
    depth = vectors * LANES
    for shape, (rows, columns) in enumerate(DOT_SHAPES):
        x, (w, exact) = normal(rows, depth + 4), stored(normal(columns, depth + 4), storage)
        out = np.full(rows * columns + 1, 7.0, np.float32)
        addresses = (x.ctypes.data, depth + 4, w.ctypes.data, depth + 4, depth, out.ctypes.data)
        call(NUM_STORAGES * shape + STORAGES.index(storage), *addresses)
        expected = x[:, :depth] @ exact[:, :depth].T
        assert np.abs(out[:-1].reshape(rows, columns) - expected).max() <= 1e-5 * max(
            1.0, np.abs(expected).max()
        )
        assert out[-1] == 7.0


def test_every_number_in_eight_bits_is_read_as_what_it_stands_for() -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    tile = NUM_STORAGES * DOT_SHAPES.index((1, 1))
    one, out = np.zeros(LANES, np.float32), np.zeros(1, np.float32)
    one[0] = 1.0
    for storage, kind in (("int8", torch.int8), ("float8", torch.float8_e4m3fn)):
        meaning = torch.from_numpy(codes).view(kind).float().tolist()
        for code, expected in zip(codes, meaning, strict=True):
            w = np.full(LANES, code)
            addresses = (one.ctypes.data, LANES, w.ctypes.data, LANES, LANES, out.ctypes.data)
            call(tile + STORAGES.index(storage), *addresses)
            assert out[0] == expected
    assert FLOAT8[codes].tolist() == meaning


@pytest.mark.parametrize("is_half", [0, 1])
def test_mix_tiles_add_to_what_is_there(is_half: int) -> None:
    for shape, (rows, vectors) in enumerate(MIX_SHAPES):
        width = vectors * LANES
        p, (v, exact), out = (
            normal(rows, 9),
            stored(normal(7, width + 2), STORAGES[is_half]),
            normal(rows, width),
        )
        expected = out + p[:, :7] @ exact[:, :width]
        addresses = (p.ctypes.data, 9, v.ctypes.data, width + 2, 7, out.ctypes.data, width)
        call(MIX + 2 * shape + is_half, *addresses)
        assert np.abs(out - expected).max() <= 1e-5


def test_softmax_of_scores_from_minus_infinity_up() -> None:
    scores = np.concatenate((np.linspace(-100, 0, 6 * LANES - 1), [-np.inf])).astype(np.float32)
    expected = np.where(scores < -87, 0, np.exp(scores.astype(np.float64)))
    largest, total = np.zeros(1, np.float32), np.zeros(1, np.float32)
    call(SOFTMAX, scores.ctypes.data, len(scores), largest.ctypes.data, total.ctypes.data)
    assert np.abs(scores - expected).max() <= 1e-7
    # The exponent is rounded before it is used, so what is nearly zero is off by a few bits.
    np.testing.assert_allclose(scores, expected, rtol=5e-6)
    assert total[0] == pytest.approx(expected.sum(), rel=1e-6)


def test_a_score_that_is_no_number_stays_none() -> None:
    scores = np.zeros(LANES, np.float32)
    scores[3] = np.nan
    largest, total = np.zeros(1, np.float32), np.zeros(1, np.float32)
    call(SOFTMAX, scores.ctypes.data, LANES, largest.ctypes.data, total.ctypes.data)
    assert np.isnan(scores).tolist() == [i == 3 for i in range(LANES)]
    assert np.isnan(total[0])


def test_gates_from_very_negative_to_very_large() -> None:
    gate = np.linspace(-200, 200, 8 * LANES).astype(np.float32)
    up = normal(8 * LANES)
    exact = gate.astype(np.float64)
    expected = exact / (1 + np.exp(-exact)) * up
    call(SILU, gate.ctypes.data, up.ctypes.data, gate.ctypes.data, len(gate))
    np.testing.assert_allclose(gate, expected, rtol=3e-6, atol=1e-30)


def test_the_largest_score_and_what_was_largest_before() -> None:
    scores, largest = normal(3 * LANES), np.full(1, -9.0, np.float32)
    scores[5] = np.nan
    for before in (-9.0, 9.0):
        largest[0] = before
        call(LARGEST, scores.ctypes.data, len(scores), largest.ctypes.data)
        assert largest[0] == max(before, np.nanmax(scores))


def half(*shape: int) -> torch.Tensor:
    return torch.from_numpy(normal(*shape)).bfloat16()


@needs_pairs
@pytest.mark.parametrize("depth", [2, 64, 96])
@pytest.mark.parametrize("adds", [False, True])
def test_panel_tiles(depth: int, adds: bool) -> None:
    for shape, (rows, panels) in enumerate(PANEL_SHAPES):
        x, w = half(rows, depth + 2), half(panels * LANES, depth)
        apart, width = LANES + 3, panels * (LANES + 3)
        out = normal(rows, width)
        before = out.copy()
        tile = PAIRS + shape + (len(PANEL_SHAPES) if adds else 0)
        weights = panels_of(w).contiguous()
        place = out.ctypes.data, width, apart
        call(tile, x.data_ptr(), depth + 2, weights.data_ptr(), LANES * depth, depth, *place)
        product = (x[:, :depth].float() @ w.float().T).numpy()
        for panel in range(panels):
            found, lanes = slice(panel * apart, panel * apart + LANES), slice(panel * LANES, None)
            expected = product[:, lanes][:, :LANES] + (before[:, found] if adds else 0)
            assert np.abs(out[:, found] - expected).max() <= 1e-4
            before[:, found] = out[:, found]
        assert np.array_equal(out, before)


@needs_pairs
def test_rows_are_rounded_to_the_nearest_even_and_no_number_stays_none() -> None:
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, torch.inf, torch.nan])
    numbers = torch.cat((ties, torch.from_numpy(normal(2 * LANES - len(ties)))))
    out = torch.zeros(2 * LANES, dtype=torch.bfloat16)
    call(PAIRS + ROUND, numbers.data_ptr(), len(numbers), out.data_ptr())
    torch.testing.assert_close(out, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)


@needs_pairs
def test_what_rounding_leaves_over_may_take_the_place_of_the_numbers() -> None:
    numbers = torch.from_numpy(normal(3 * LANES))
    rounded = numbers.bfloat16()
    left = (numbers - rounded.float()).bfloat16()
    out = torch.zeros_like(rounded)
    call(PAIRS + SPLIT, numbers.data_ptr(), len(numbers), out.data_ptr(), numbers.data_ptr())
    assert torch.equal(out, rounded)
    assert torch.equal(numbers.view(torch.bfloat16)[: len(left)], left)


@needs_pairs
def test_neighbours_are_transformed_as_in_plain_operations() -> None:
    numbers = normal(3 * HADAMARD_SIZE)
    expected = hadamard(torch.from_numpy(numbers))
    call(PAIRS + HADAMARD, numbers.ctypes.data, len(numbers), numbers.ctypes.data)
    torch.testing.assert_close(torch.from_numpy(numbers), expected, rtol=1e-5, atol=1e-5)


@needs_pairs
def test_keys_turn_and_values_zip_into_panels() -> None:
    keys = half(LANES, 6 * LANES)
    panel = torch.zeros_like(keys).flatten()
    call(PAIRS + TURN, keys.data_ptr(), 6 * LANES, 6 * LANES, panel.data_ptr())
    assert torch.equal(panel, panels_of(keys).flatten())
    values = half(2, 4 * LANES)
    panels = torch.zeros(4, 5, LANES, 2, dtype=torch.bfloat16)
    call(PAIRS + ZIP, values.data_ptr(), 4 * LANES, panels.data_ptr(), 5 * LANES * 2)
    assert torch.equal(panels[:, 0], panels_of(values.T.contiguous())[:, 0])


def test_object_code_that_was_kept_is_used_again(tmp_path: Path) -> None:
    first = tile_addresses(tmp_path)
    (kept,) = tmp_path.glob("tiles-*.o")
    written_at = kept.stat().st_mtime_ns
    tile_addresses.cache_clear()
    again = tile_addresses(tmp_path)
    assert len(again) == len(first)
    assert kept.stat().st_mtime_ns == written_at

"""Masks on logits: what is excluded, what stays, and who cannot go on."""

from __future__ import annotations

import torch

from worker.runner.grammar_rows import ruled

INF = torch.inf


def test_rows_with_a_mask_keep_what_it_allows_and_others_everything() -> None:
    logits = torch.arange(20.0).view(2, 10)
    found = ruled(logits, {1: bytes([0b00000101, 0b11111110])})
    expected = torch.full((10,), -INF)
    expected[[0, 2, 9]] = torch.tensor([10.0, 12.0, 19.0])
    assert torch.equal(found[0], logits[0])
    assert torch.equal(found[1], expected)
    assert torch.equal(logits, torch.arange(20.0).view(2, 10))


def test_masks_for_all_rows_stand_in_their_order() -> None:
    found = ruled(torch.ones(3, 8), {0: b"\x01", 1: b"\x80", 2: b"\x00"})
    assert found.argmax(dim=-1).tolist() == [0, 7, 0]
    assert found.isfinite().sum(dim=-1).tolist() == [1, 1, 0]


def test_without_masks_logits_are_handed_on() -> None:
    logits = torch.ones(1, 8)
    assert ruled(logits, {}) is logits

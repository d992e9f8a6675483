"""Copies of weights that lie behind each other, each at the start of a line of cache."""

from __future__ import annotations

import torch

from worker.model.weight_memory import WeightMemory


def test_tensors_lie_in_the_order_in_which_they_came() -> None:
    originals = [torch.arange(33, dtype=torch.bfloat16), torch.randn(4, 6), torch.randn(2, 16)]
    memory = WeightMemory(sum(tensor.nbytes for tensor in originals), num_tensors=3)
    copies = [memory.place(tensor) for tensor in originals]
    del memory
    for copy, original in zip(copies, originals, strict=True):
        assert copy.dtype == original.dtype
        assert torch.equal(copy, original)
    start = copies[0].data_ptr()
    assert [copy.data_ptr() - start for copy in copies] == [0, 128, 256]
    assert start % 64 == 0


def test_what_was_not_contiguous_is_afterwards() -> None:
    turned = torch.arange(12.0).view(3, 4).t()
    copy = WeightMemory(turned.nbytes, num_tensors=1).place(turned)
    assert copy.is_contiguous()
    assert torch.equal(copy, turned)

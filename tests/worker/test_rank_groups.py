"""Every way in which ranks meet gives each of them the same sums, columns and numbers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.model.parallel import ALONE, DistributedRanks, RankGroup
from worker.model.shared_ranks import SharedMemoryRanks, can_share_memory

SIZE = 3
LARGE = (1 << 20) + 5


def by_gloo(rank: int, folder: Path) -> RankGroup:
    url = f"file://{folder}/rendezvous"
    return DistributedRanks(rank, SIZE, rendezvous=url, device=torch.device("cpu"))


def by_shared_memory(rank: int, folder: Path) -> RankGroup:
    return SharedMemoryRanks(rank, SIZE, rendezvous=folder / "rendezvous")


def act(join: Callable[[int, Path], RankGroup], rank: int, folder: Path, answers: Any) -> None:
    """Be one rank: take part in every operation, and report what came of it."""
    torch.set_num_threads(1)
    ranks = join(rank, folder)
    small = torch.tensor([[1.0, 10.0]]) * (rank + 1)
    total = ranks.sum(small)
    large = ranks.sum(torch.full((LARGE,), float(rank)))
    rounded = ranks.sum(torch.tensor([256.0 if rank == 0 else 0.75], dtype=torch.bfloat16))
    columns = ranks.join_columns(torch.tensor([[rank, -rank], [10.0, 20.0]]), total=5)
    empty = ranks.join_columns(torch.empty(0, 2), total=5)
    answers.put(
        (
            rank,
            (
                total.tolist(),
                [large.numel(), float(large.min()), float(large.max())],
                (rounded.dtype, rounded.tolist()),
                columns.tolist(),
                list(empty.shape),
                ranks.smallest(7 - rank),
            ),
        )
    )
    ranks.leave()


@pytest.mark.parametrize(
    "join",
    [
        by_gloo,
        pytest.param(
            by_shared_memory,
            marks=pytest.mark.skipif(not can_share_memory(), reason="not x86 with /dev/shm"),
        ),
    ],
)
def test_every_rank_gets_the_same(tmp_path: Path, join: Callable[[int, Path], RankGroup]) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=act, args=(join, rank, tmp_path, answers)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    expected = (
        [[6.0, 60.0]],
        [LARGE, 3.0, 3.0],
        (torch.bfloat16, [258.0]),  # 257.5, rounded once: bfloat16 goes in steps of 2 there
        [[0.0, 0.0, 1.0, -1.0, 2.0], [10.0, 20.0, 10.0, 20.0, 10.0]],
        [0, 5],
        5,
    )
    assert found == {rank: expected for rank in range(SIZE)}
    assert not list(Path("/dev/shm").glob("prefixfleet-ranks-*"))


def test_one_rank_alone_keeps_what_it_has() -> None:
    x = torch.tensor([[1.0, 2.0, 0.0]])
    assert ALONE.sum(x) is x
    assert ALONE.join_columns(x, total=2).tolist() == [[1.0, 2.0]]
    assert ALONE.smallest(3) == 3

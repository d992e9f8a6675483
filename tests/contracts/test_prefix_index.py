"""The contract of PrefixIndex, held by the index in memory and by the one in Redis."""

from __future__ import annotations

import msgspec
import pytest

from kvindex.index import (
    ApplyResult,
    IndexOp,
    LoadReport,
    SequencedOps,
    Target,
    TargetMatch,
    TargetState,
)
from tests.contracts.index_subject import (
    BOOT_NS,
    CLEARED,
    A,
    B,
    Subject,
    chain,
    removed,
    stored,
)

REPORT = LoadReport(mode="EXACT", num_running=3)


def batch(seq: int, *ops: IndexOp) -> SequencedOps:
    return SequencedOps(seq, ops)


# Epochs and leases


async def test_the_first_epoch_is_the_boot_time(subject: Subject) -> None:
    assert await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60) == BOOT_NS


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (BOOT_NS, BOOT_NS, BOOT_NS + 1),
        (BOOT_NS, BOOT_NS - 10, BOOT_NS + 1),
        (BOOT_NS, BOOT_NS + 5_000, BOOT_NS + 5_000),
        (1_799_999_999_999_999_999, 17, 1_800_000_000_000_000_000),
        (999, 3, 1000),
        (0, 0, 1),
    ],
)
async def test_an_epoch_grows_with_every_registration(
    subject: Subject, first: int, second: int, expected: int
) -> None:
    await subject.index.register(A, boot_ns=first, lease_s=60)
    assert await subject.index.register(A, boot_ns=second, lease_s=60) == expected


async def test_an_epoch_outlives_its_target(subject: Subject) -> None:
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    await subject.index.deregister(A, epoch)
    assert await subject.index.register(A, boot_ns=5, lease_s=60) == BOOT_NS + 1


async def test_a_new_epoch_starts_empty_and_fences_the_old_one(subject: Subject) -> None:
    hashes = chain(3)
    old = await subject.filled(A, hashes)
    new = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    assert await subject.matched(hashes) == {"a": 0}
    fenced = ApplyResult(status="fenced", applied_seq=None)
    assert await subject.index.apply(A, old, [batch(1, stored(hashes))]) == fenced
    assert not await subject.index.load_snapshot(A, old, seq=5, ops=[stored(hashes)])
    assert not await subject.index.renew(A, old, lease_s=60, report=REPORT)
    await subject.index.deregister(A, old)
    assert (await subject.match_one(hashes)).epoch == new


async def test_a_lapsed_lease_hides_the_target_and_cannot_be_renewed(subject: Subject) -> None:
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=0.02)
    await subject.elapse(0.02)
    assert await subject.index.match(chain(1)) == []
    assert await subject.index.states() == []
    assert not await subject.index.renew(A, epoch, lease_s=60, report=REPORT)
    assert await subject.index.match(chain(1)) == []
    fenced = ApplyResult(status="fenced", applied_seq=None)
    assert await subject.index.apply(A, epoch, [batch(0)]) == fenced


async def test_renewal_extends_the_lease_and_stores_the_report(subject: Subject) -> None:
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=0.5)
    assert (await subject.match_one([])).report == LoadReport()
    assert await subject.index.renew(A, epoch, lease_s=60, report=REPORT)
    await subject.elapse(0.5)
    assert (await subject.match_one([])).report == REPORT


async def test_an_unknown_target_can_neither_renew_nor_apply(subject: Subject) -> None:
    assert not await subject.index.renew(A, 1, lease_s=60, report=REPORT)
    assert (await subject.index.apply(A, 1, [batch(0)])).status == "fenced"
    await subject.index.deregister(A, 1)


async def test_deregistering_drops_the_target_at_once(subject: Subject) -> None:
    epoch = await subject.filled(A, chain(2))
    await subject.index.deregister(A, epoch)
    assert await subject.index.match(chain(2)) == []


# Batches


async def test_batches_are_applied_in_order(subject: Subject) -> None:
    hashes = chain(3)
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    result = await subject.index.apply(
        A,
        epoch,
        [batch(0, stored(hashes), removed(hashes[2:])), batch(1), batch(2, removed(hashes[1:2]))],
    )
    assert result == ApplyResult(status="applied", applied_seq=2)
    assert await subject.matched(hashes) == {"a": 1}


async def test_an_applied_batch_is_skipped(subject: Subject) -> None:
    hashes = chain(2)
    epoch = await subject.filled(A, hashes)
    again = [batch(0, removed(hashes)), batch(1, stored(chain(1, "y")))]
    assert await subject.index.apply(A, epoch, again) == ApplyResult(
        status="applied", applied_seq=1
    )
    assert await subject.matched(hashes) == {"a": 2}
    assert await subject.matched(chain(1, "y")) == {"a": 1}


async def test_nothing_after_a_gap_is_applied(subject: Subject) -> None:
    x, y, z = chain(1, "x"), chain(1, "y"), chain(1, "z")
    epoch = await subject.filled(A, [])
    result = await subject.index.apply(
        A, epoch, [batch(1, stored(x)), batch(3, stored(y)), batch(4, stored(z))]
    )
    assert result == ApplyResult(status="gap", applied_seq=1)
    assert [await subject.matched(h) for h in (x, y, z)] == [{"a": 1}, {"a": 0}, {"a": 0}]


@pytest.mark.fault("router-2")
async def test_the_first_batch_after_registration_must_be_number_zero(subject: Subject) -> None:
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    result = await subject.index.apply(A, epoch, [batch(1, stored(chain(1)))])
    assert result == ApplyResult(status="gap", applied_seq=None)
    assert await subject.matched(chain(1)) == {"a": 0}


async def test_applying_no_batch_tells_the_position(subject: Subject) -> None:
    epoch = await subject.filled(A, [])
    assert await subject.index.apply(A, epoch, []) == ApplyResult(status="applied", applied_seq=0)


async def test_cleared_empties_every_tier_and_group(subject: Subject) -> None:
    hashes = chain(4)
    epoch = await subject.filled(A, hashes[:2])
    await subject.index.apply(
        A,
        epoch,
        [
            batch(
                1, stored(hashes, tier="host"), stored(hashes, group=1), CLEARED, stored(hashes[:1])
            )
        ],
    )
    assert await subject.matched(hashes) == {"a": 1}
    (state,) = await subject.index.states()
    assert state.num_blocks == {"gpu": 1, "host": 0}


# Snapshots


async def test_a_snapshot_replaces_the_inventory(subject: Subject) -> None:
    old, new = chain(3, "old"), chain(4, "new")
    epoch = await subject.filled(A, old)
    ops = [stored(new[:2]), stored(new[2:], tier="host"), stored(new, group=1)]
    assert await subject.index.load_snapshot(A, epoch, seq=41, ops=ops)
    assert await subject.matched(old) == {"a": 0}
    assert await subject.matched(new) == {"a": 4}
    result = await subject.index.apply(A, epoch, [batch(41, removed(new)), batch(42)])
    assert result == ApplyResult(status="applied", applied_seq=42)
    assert await subject.matched(new) == {"a": 4}


async def test_an_empty_snapshot_before_the_first_batch(subject: Subject) -> None:
    epoch = await subject.filled(A, chain(3))
    assert await subject.index.load_snapshot(A, epoch, seq=-1, ops=[])
    assert await subject.matched(chain(3)) == {"a": 0}
    result = await subject.index.apply(A, epoch, [batch(1)])
    assert result == ApplyResult(status="gap", applied_seq=None)
    assert (await subject.index.apply(A, epoch, [batch(0)])).status == "applied"


async def test_a_big_snapshot_comes_in_whole(subject: Subject) -> None:
    hashes = chain(12_345)
    epoch = await subject.filled(A, chain(3, "old"))
    assert await subject.index.load_snapshot(A, epoch, seq=7, ops=[stored(hashes)])
    assert await subject.matched(hashes) == {"a": 12_345}
    (state,) = await subject.index.states()
    assert state.num_blocks == {"gpu": 12_345, "host": 0}


# Matching


@pytest.mark.parametrize("held", [0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 99, 100])
async def test_the_longest_prefix_is_found_at_every_length(subject: Subject, held: int) -> None:
    hashes = chain(100)
    await subject.filled(A, hashes[:held])
    assert await subject.matched(hashes) == {"a": held}


async def test_a_match_stops_at_the_end_of_the_prompt(subject: Subject) -> None:
    await subject.filled(A, chain(100))
    assert [(await subject.matched(chain(n)))["a"] for n in (0, 1, 5, 64)] == [0, 1, 5, 64]


@pytest.mark.fault("router-11")
async def test_a_hole_ends_the_match(subject: Subject) -> None:
    hashes = chain(3)
    await subject.filled(A, [hashes[0], hashes[2]])
    await subject.filled(B, hashes)
    assert await subject.matched(hashes) == {"a": 1, "b": 3}


@pytest.mark.fault("router-11")
async def test_no_first_block_is_no_match(subject: Subject) -> None:
    hashes = chain(3)
    await subject.filled(A, hashes[1:])
    await subject.filled(B, [])
    assert await subject.matched(hashes) == {"a": 0, "b": 0}


@pytest.mark.fault("router-7")
async def test_a_block_that_moved_to_the_host_still_counts(subject: Subject) -> None:
    hashes = chain(4)
    epoch = await subject.filled(A, hashes)
    moved = hashes[2:]
    await subject.index.apply(A, epoch, [batch(1, stored(moved, tier="host"), removed(moved))])
    assert await subject.matched(hashes) == {"a": 4}
    (state,) = await subject.index.states()
    assert state.num_blocks == {"gpu": 2, "host": 2}
    await subject.index.apply(A, epoch, [batch(2, removed(moved, tier="host"))])
    assert await subject.matched(hashes) == {"a": 2}


@pytest.mark.fault("router-4")
async def test_a_removal_by_one_replica_leaves_the_others_alone(subject: Subject) -> None:
    hashes = chain(5)
    epoch = await subject.filled(A, hashes)
    await subject.filled(B, hashes)
    await subject.index.apply(A, epoch, [batch(1, removed(hashes)), batch(2, removed(hashes))])
    assert await subject.matched(hashes) == {"a": 0, "b": 5}


@pytest.mark.fault("router-10")
async def test_ranks_of_one_replica_are_separate_targets(subject: Subject) -> None:
    ranks = [Target("a", 0), Target("a", 1)]
    x, y = chain(3, "x"), chain(2, "y")
    epochs = [await subject.filled(ranks[0], x), await subject.filled(ranks[1], y)]
    assert [m.target for m in await subject.index.match([])] == ranks
    assert [m.matched_blocks for m in await subject.index.match(x)] == [3, 0]
    assert [m.matched_blocks for m in await subject.index.match(y)] == [0, 2]
    first = await subject.index.apply(ranks[0], epochs[0], [batch(1), batch(2)])
    second = await subject.index.apply(ranks[1], epochs[1], [batch(1)])
    assert (first.applied_seq, second.applied_seq) == (2, 1)


@pytest.mark.fault("router-31")
async def test_every_holder_of_a_block_is_credited(subject: Subject) -> None:
    hashes = chain(8)
    names = [f"replica-{i:02}" for i in range(12)]
    for name in names:
        await subject.filled(Target(name), hashes)
    assert await subject.matched(hashes) == dict.fromkeys(names, 8)


@pytest.mark.fault("router-19")
@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 1])
async def test_short_hashes_and_digests_name_the_same_block(subject: Subject, value: int) -> None:
    short = value.to_bytes(8, "big")
    await subject.filled(A, [short])
    assert await subject.matched([b"\xee" * 24 + short]) == {"a": 1}
    assert await subject.matched([b"\xee" * 32]) == {"a": 0}


# States


async def test_states_show_every_live_target(subject: Subject) -> None:
    epoch = await subject.filled(B, chain(3))
    await subject.index.renew(B, epoch, lease_s=60, report=REPORT)
    await subject.index.register(A, boot_ns=7, lease_s=60)
    states = await subject.index.states()
    assert all(59 < state.lease_left_s <= 60 for state in states)
    assert [msgspec.structs.replace(state, lease_left_s=60) for state in states] == [
        TargetState(
            target=A,
            epoch=7,
            applied_seq=None,
            num_blocks={"gpu": 0, "host": 0},
            lease_left_s=60,
            report=LoadReport(),
        ),
        TargetState(
            target=B,
            epoch=BOOT_NS,
            applied_seq=0,
            num_blocks={"gpu": 3, "host": 0},
            lease_left_s=60,
            report=REPORT,
        ),
    ]


async def test_an_empty_index_matches_nobody(subject: Subject) -> None:
    assert await subject.index.match(chain(3)) == []
    assert await subject.index.states() == []


async def test_a_match_tells_everything_at_once(subject: Subject) -> None:
    hashes = chain(6)
    epoch = await subject.filled(A, hashes[:2])
    await subject.index.renew(A, epoch, lease_s=60, report=REPORT)
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", prefill_tokens=64, num_blocks=4, pending=hashes[2:5])
    assert await subject.index.match(hashes) == [
        TargetMatch(
            target=A,
            epoch=epoch,
            matched_blocks=2,
            pending_blocks=3,
            reserved_prefill_tokens=64,
            reserved_blocks=4,
            num_reserved=1,
            report=REPORT,
        )
    ]

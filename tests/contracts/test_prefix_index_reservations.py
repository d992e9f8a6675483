"""The part of the contract of PrefixIndex about reservations and pending blocks."""

from __future__ import annotations

from kvindex.index import PrefillEnd, Release, Reservation
from tests.contracts.index_subject import BOOT_NS, A, B, Subject, chain


async def test_a_reservation_counts_once_until_it_is_released(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r1", prefill_tokens=100, num_blocks=7)
    await subject.reserve("r1", prefill_tokens=100, num_blocks=7)
    await subject.reserve("r2", prefill_tokens=20, num_blocks=2)
    assert await subject.load() == (120, 9, 2)
    await subject.index.release_prefill(A, "r1", 0)
    await subject.index.release_prefill(A, "r1", 0)
    assert await subject.load() == (20, 9, 2)
    await subject.index.release(A, "r1", 0, written=True)
    await subject.index.release(A, "r1", 0, written=True)
    assert await subject.load() == (20, 2, 1)
    await subject.index.release(A, "r2", 0, written=False)
    await subject.index.release(A, "r2", 0, written=False)
    assert await subject.load() == (0, 0, 0)


async def test_attempts_count_separately(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", attempt=0, prefill_tokens=10, num_blocks=1)
    await subject.reserve("r", attempt=1, prefill_tokens=10, num_blocks=1)
    await subject.index.release(A, "r", 0, written=False)
    assert await subject.load() == (10, 1, 1)


async def test_releasing_the_unknown_changes_nothing(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.release_prefill(A, "r", 0)
    await subject.index.release(A, "r", 0, written=True)
    await subject.index.release(B, "r", 0, written=False)
    assert await subject.load() == (0, 0, 0)


async def test_an_empty_reservation_is_released_cleanly(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", prefill_tokens=0, num_blocks=0)
    assert await subject.load() == (0, 0, 1)
    await subject.index.release_prefill(A, "r", 0)
    await subject.index.release(A, "r", 0, written=True)
    assert await subject.load() == (0, 0, 0)


async def test_reservations_of_all_gateways_are_summed(subject: Subject) -> None:
    await subject.filled(A, [])
    for gateway in ("g1", "g2"):
        await subject.index.touch_gateway(gateway, lease_s=60)
        await subject.reserve(f"r-{gateway}", gateway=gateway, prefill_tokens=5, num_blocks=1)
    assert await subject.load() == (10, 2, 2)


async def test_a_lapsed_gateway_stops_counting_for_good(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=0.4)
    await subject.index.touch_gateway("other", lease_s=60)
    await subject.reserve("r", prefill_tokens=5, num_blocks=1, pending=chain(1))
    await subject.reserve("s", gateway="other", prefill_tokens=1, num_blocks=1)
    assert (await subject.match_one(chain(1))).pending_blocks == 1
    await subject.elapse(0.4)
    assert await subject.load() == (1, 1, 1)
    assert (await subject.match_one(chain(1))).pending_blocks == 0
    await subject.index.touch_gateway("g", lease_s=60)
    assert await subject.load() == (1, 1, 1)
    await subject.index.release(A, "r", 0, written=False)
    assert await subject.load() == (1, 1, 1)


async def test_nothing_is_counted_without_a_live_gateway_or_target(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.reserve("r")
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", target=B)
    await subject.filled(B, [])
    assert [m.num_reserved for m in await subject.index.match([])] == [0, 0]


async def test_a_new_epoch_forgets_what_was_reserved(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=chain(2))
    await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    match = await subject.match_one(chain(2))
    assert (match.num_reserved, match.reserved_blocks, match.pending_blocks) == (0, 0, 0)
    await subject.index.release(A, "r", 0, written=True)
    assert await subject.load() == (0, 0, 0)


# Pending blocks


async def test_pending_blocks_follow_the_matched_ones(subject: Subject) -> None:
    hashes = chain(10)
    await subject.filled(A, hashes[:3])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=hashes[3:8])
    match = await subject.match_one(hashes)
    assert (match.matched_blocks, match.pending_blocks) == (3, 5)
    other = await subject.match_one(hashes[:2] + chain(3, "y"))
    assert (other.matched_blocks, other.pending_blocks) == (2, 0)


async def test_pending_blocks_that_do_not_follow_directly_do_not_count(subject: Subject) -> None:
    hashes = chain(10)
    await subject.filled(A, hashes[:3])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=hashes[4:8])
    assert (await subject.match_one(hashes)).pending_blocks == 0


async def test_pending_blocks_of_several_requests_add_up(subject: Subject) -> None:
    hashes = chain(10)
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r1", pending=hashes[:4])
    await subject.reserve("r2", pending=hashes[:6])
    assert (await subject.match_one(hashes)).pending_blocks == 6
    await subject.index.release(A, "r2", 0, written=False)
    assert (await subject.match_one(hashes)).pending_blocks == 4
    await subject.index.release(A, "r1", 0, written=False)
    assert (await subject.match_one(hashes)).pending_blocks == 0


async def test_written_blocks_stay_pending_until_their_time_is_over(subject: Subject) -> None:
    hashes = chain(4)
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=hashes, pending_ttl_s=0.4)
    await subject.index.release(A, "r", 0, written=True)
    match = await subject.match_one(hashes)
    assert (match.pending_blocks, match.num_reserved) == (4, 0)
    await subject.elapse(0.4)
    assert (await subject.match_one(hashes)).pending_blocks == 0


async def test_pending_ends_with_its_time_while_the_request_still_counts(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=chain(4), pending_ttl_s=0.02)
    await subject.elapse(0.02)
    match = await subject.match_one(chain(4))
    assert (match.pending_blocks, match.num_reserved) == (0, 1)


async def test_twenty_siblings_share_their_pending_prefix(subject: Subject) -> None:
    hashes = chain(5)
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    await subject.reserve("last", pending=hashes)
    for i in range(20):
        await subject.reserve(f"r{i}", pending=hashes, pending_ttl_s=0.001)
    await subject.elapse(0.001)
    assert (await subject.match_one(hashes)).pending_blocks == 5


async def test_what_is_announced_together_is_done_in_order(subject: Subject) -> None:
    await subject.filled(A, [])
    await subject.index.touch_gateway("g", lease_s=60)
    hashes = tuple(chain(4))

    def reservation(request_id: str, *, prefill_tokens: int) -> Reservation:
        return Reservation(
            request_id=request_id,
            attempt=0,
            target=A,
            gateway="g",
            prefill_tokens=prefill_tokens,
            num_blocks=7,
            pending=hashes,
        )

    await subject.index.announce(
        [
            Release(A, "r1", 0, written=False),
            reservation("r1", prefill_tokens=100),
            reservation("r2", prefill_tokens=20),
            PrefillEnd(A, "r1", 0),
            reservation("r3", prefill_tokens=1),
            Release(A, "r3", 0, written=False),
        ]
    )
    assert await subject.load() == (20, 14, 2)
    await subject.index.announce([Release(A, "r1", 0, written=False)])
    assert (await subject.match_one(hashes)).pending_blocks == 4
    await subject.index.announce([Release(A, "r2", 0, written=False)])
    assert (await subject.match_one(hashes)).pending_blocks == 0
    assert await subject.load() == (0, 0, 0)

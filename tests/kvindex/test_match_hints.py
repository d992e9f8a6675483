"""Hints say where to look first, and change no answer."""

from __future__ import annotations

import random

import pytest

from kvindex.index import SequencedOps, Target
from kvindex.match_hints import FIRST_ANCHOR, MatchHints
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from tests.contracts.index_subject import BOOT_NS, chain, stored
from tests.redis_server import RedisServer

X = chain(300)


def test_a_longer_chain_is_told_what_the_shorter_one_found() -> None:
    hints: MatchHints[bytes] = MatchHints()
    hints.remember(X[:130], b"found")
    assert hints.of_chain(X) == b"found"
    assert hints.of_chain(X[:20]) == b"found"
    assert hints.of_chain([*X[:10], *chain(50, "y")]) == b"found"
    assert hints.of_chain(chain(300, "y")) is None


def test_the_longest_chain_that_begins_alike_is_the_one_that_counts() -> None:
    hints: MatchHints[bytes] = MatchHints()
    other = [*X[:40], *chain(200, "y")]
    hints.remember(X, b"long")
    hints.remember(other, b"short")
    assert hints.of_chain(X[:100]) == b"long"
    assert hints.of_chain(other) == b"short"
    assert hints.of_chain(X[:40]) == b"short"


def test_chains_too_short_to_be_recognised_are_not_kept() -> None:
    hints: MatchHints[bytes] = MatchHints()
    hints.remember(X[:FIRST_ANCHOR], b"found")
    assert hints.of_chain(X[:FIRST_ANCHOR]) is None


@pytest.mark.fault("router-33")
def test_the_number_of_chains_is_bounded() -> None:
    hints: MatchHints[bytes] = MatchHints(max_chains=6)
    hints.remember(X[:32], b"first")
    for i in range(10):
        hints.remember(chain(32, f"y{i}"), b"later")
    assert hints.of_chain(X) is None
    assert hints.of_chain(chain(32, "y9")) == b"later"


async def test_whatever_is_remembered_the_answer_is_the_same(private_redis: RedisServer) -> None:
    rng = random.Random(3)
    hinted = RedisIndex(connect(private_redis.url), "pool")
    targets = [Target(f"r{i}") for i in range(40)]
    held = {target: rng.randrange(len(X) + 1) for target in targets}
    epochs = {}
    for target in targets:
        epochs[target] = await hinted.register(target, boot_ns=BOOT_NS, lease_s=60)
        batch = SequencedOps(0, (stored(X[: held[target]]),))
        await hinted.apply(target, epochs[target], [batch])
    for _ in range(30):
        target, length = rng.choice(targets), rng.randrange(len(X) + 1)
        epochs[target] = await _restart(hinted, target, X[:length])
        held[target] = length
        asked = X[: rng.randrange(1, len(X) + 1)]
        found = {match.target: match.matched_blocks for match in await hinted.match(asked)}
        assert found == {t: min(n, len(asked)) for t, n in held.items()}
    await hinted.close()


async def _restart(index: RedisIndex, target: Target, hashes: list[bytes]) -> int:
    """Register a target anew with these blocks."""
    epoch = await index.register(target, boot_ns=BOOT_NS, lease_s=60)
    await index.apply(target, epoch, [SequencedOps(0, (stored(hashes),))])
    return epoch

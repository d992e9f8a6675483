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


def test_a_longer_chain_is_told_where_the_shorter_one_ended() -> None:
    hints = MatchHints()
    hints.remember(X[:130], [100, 40, 100, 0])
    assert hints.ends_for(X) == (0, 40, 100)
    assert hints.ends_for(X[:20]) == (0, 40, 100)
    assert hints.ends_for([*X[:10], *chain(50, "y")]) == (0, 40, 100)
    assert hints.ends_for(chain(300, "y")) == ()


def test_the_longest_chain_that_begins_alike_is_the_one_that_counts() -> None:
    hints = MatchHints()
    other = [*X[:40], *chain(200, "y")]
    hints.remember(X, [250])
    hints.remember(other, [60])
    assert hints.ends_for(X[:100]) == (250,)
    assert hints.ends_for(other) == (60,)
    assert hints.ends_for(X[:40]) == (60,)


def test_chains_too_short_to_be_recognised_are_not_kept() -> None:
    hints = MatchHints()
    hints.remember(X[:FIRST_ANCHOR], [3])
    assert hints.ends_for(X[:FIRST_ANCHOR]) == ()


@pytest.mark.fault("router-33")
def test_the_number_of_chains_and_of_ends_is_bounded() -> None:
    hints = MatchHints(max_chains=6)
    hints.remember(X[:32], range(1000))
    assert len(hints.ends_for(X)) <= 256
    for i in range(10):
        hints.remember(chain(32, f"y{i}"), [1])
    assert hints.ends_for(X) == ()
    assert hints.ends_for(chain(32, "y9")) == (1,)


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

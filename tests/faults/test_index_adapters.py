"""Adapters and salts in the chain: the index credits what the engine would really hit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvindex.hashing import Adapter, HashScheme, hash_tokens
from kvindex.index import SequencedOps
from kvindex.memory_index import MemoryIndex
from tests.contracts.index_subject import A, stored

SCHEME = HashScheme()
TOKENS = list(range(64))


def credited(held: Sequence[bytes], wanted: Sequence[bytes]) -> int:
    index = MemoryIndex()
    epoch = index.register(A, boot_ns=1, lease_s=60)
    index.apply(A, epoch, [SequencedOps(0, (stored(held),))])
    (match,) = index.match(wanted)
    return match.matched_blocks


@pytest.mark.fault("router-16")
def test_an_adapter_matches_itself_and_nothing_else() -> None:
    x, y = Adapter("x", "/adapters/x"), Adapter("y", "/adapters/y")
    held = hash_tokens(TOKENS, SCHEME, adapter=x)
    assert credited(held, hash_tokens(TOKENS, SCHEME, adapter=x)) == 4
    assert credited(held, hash_tokens(TOKENS, SCHEME, adapter=y)) == 0
    assert credited(held, hash_tokens(TOKENS, SCHEME)) == 0


@pytest.mark.fault("router-16")
def test_an_adapter_and_a_salt_of_the_same_name_are_different() -> None:
    held = hash_tokens(TOKENS, SCHEME, adapter=Adapter("t", "t"))
    assert credited(held, hash_tokens(TOKENS, SCHEME, cache_salt="t")) == 0
    salted = hash_tokens(TOKENS, SCHEME, cache_salt="t")
    assert credited(salted, hash_tokens(TOKENS, SCHEME, cache_salt="t")) == 4

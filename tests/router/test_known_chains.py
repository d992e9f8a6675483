"""Hashes that are looked up are those that would be computed."""

from __future__ import annotations

import pytest

from kvindex import hashing
from kvindex.hashing import Adapter, HashScheme, hash_tokens
from router.request.known_chains import KnownChains

SCHEME = HashScheme(block_size=4)
STRETCH = 32
"""Tokens of eight blocks."""


@pytest.mark.parametrize("scheme", [SCHEME, HashScheme(algorithm="sha256", block_size=4)])
def test_hashes_are_the_same_whatever_is_known(scheme: HashScheme) -> None:
    chains = KnownChains()
    longest = [7 * i % 50_021 for i in range(5 * STRETCH + 3)]
    for length in (0, 3, 4, STRETCH - 1, STRETCH, STRETCH + 5, 3 * STRETCH, len(longest), 4):
        for tokens in (longest[:length], [*longest[:length], 9, 9, 9, 9], longest[1 : length + 1]):
            found = chains.hash_tokens(tokens, scheme, cache_salt="salt")
            assert found == hash_tokens(tokens, scheme, cache_salt="salt")


def test_salts_adapters_and_schemes_know_nothing_of_each_other() -> None:
    chains, tokens = KnownChains(), list(range(2 * STRETCH))
    seeded = HashScheme(seed="another", block_size=4)
    adapter = Adapter("a", "/a")
    for _ in range(2):
        for scheme in (SCHEME, seeded):
            for salt in ("one", "other"):
                for lora in (None, adapter):
                    found = chains.hash_tokens(tokens, scheme, cache_salt=salt, adapter=lora)
                    assert found == hash_tokens(tokens, scheme, cache_salt=salt, adapter=lora)


def test_only_what_is_new_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    chains, tokens = KnownChains(), list(range(2 * STRETCH))
    chains.hash_tokens(tokens, SCHEME, cache_salt="x")
    hashed: list[int] = []
    chain_cbor = hashing._chain_cbor

    def counted(parent: bytes, new: list[int], *rest: object) -> object:
        hashed.append(len(new))
        return chain_cbor(parent, new, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hashing, "_chain_cbor", counted)
    chains.hash_tokens([*tokens, 1, 2, 3, 4, 5], SCHEME, cache_salt="x")
    chains.hash_tokens(tokens, SCHEME, cache_salt="x")
    assert hashed == [4]


def test_the_oldest_make_room() -> None:
    chains = KnownChains(max_stretches=2)
    tokens = list(range(4 * STRETCH))
    for _ in range(2):
        found = chains.hash_tokens(tokens, SCHEME, cache_salt="x")
        assert found == hash_tokens(tokens, SCHEME, cache_salt="x")
    assert len(chains._hashes) == 2

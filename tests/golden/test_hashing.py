"""Golden vectors of the hash chain (vLLM's own functions give the same digests)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.hashing import (
    Adapter,
    Algorithm,
    BlockHash,
    HashScheme,
    canonical_cbor,
    hash_block,
    hash_tokens,
    root_hash,
    short_hash,
)

VECTORS: list[tuple[Algorithm, str, dict[str, str]]] = [
    (
        "sha256",
        "vllm-none-hash",
        {
            "NONE": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
            "A": "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a",
            "B": "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde",
            "S": "27e9d22fdd2d0c225d4a572eda1e109d3ed91cd2da0c6eb30552f0aa1d8d5418",
            "L": "eeeb6344f6da5946a2254977d165bdb9e6acf13968df56592a7ff583e943a6c5",
            "T16": "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        },
    ),
    (
        "sha256_cbor",
        "vllm-none-hash",
        {
            "NONE": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
            "A": "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
            "B": "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
            "S": "0e172de9010f20a975885630390148d0769af6bbe75a732d3b66b62598433cae",
            "L": "326ed5f46766ea6f81a77555bdfd7e22f2385b80652dfa9b70116de98c84241a",
            "T16": "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
        },
    ),
    (
        "sha256",
        "0",
        {
            "NONE": "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
            "A": "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
            "B": "9e62b5a7ec298f33cb4c7d9e00b659874bb2432d23ad6879ad1746592a2b036b",
            "S": "d5ba937a73d891005afc9914a9439091e6f7eb8ae2af809c287615c05d4dfe03",
            "L": "14e42c798d7fe06725a2d8d48c3f574d7a76be6d5c25bea48256dd8ab1afb293",
        },
    ),
    (
        "sha256_cbor",
        "0",
        {
            "NONE": "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
            "A": "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
            "B": "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
            "S": "6d7c30cb6f20dee666a6c6005cb423ea5c1febb3d260951ae61a0a49a8358a68",
            "L": "fbf255f2769e2ba1564144dfe7d77734050ce9df9daa127ee4b1affbe4c4f773",
            "T16": "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c",
        },
    ),
    (
        "sha256_cbor",
        "42",
        {
            "NONE": "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780",
            "A": "0a99040f25d8a5f22275b867f403918da98c9d140eaea10f5319d4d1d84429df",
            "T16": "63876f948a5f9ef88191c7d6554fbeeea5c622d4da15d0d527bd352623590b0d",
        },
    ),
]


@pytest.mark.fault("engine-15")
@pytest.mark.parametrize(("algorithm", "seed", "expected"), VECTORS)
def test_chain_equals_the_reference_vectors(
    algorithm: Algorithm, seed: str, expected: dict[str, str]
) -> None:
    scheme = HashScheme(algorithm=algorithm, seed=seed, block_size=4)
    plain = hash_tokens(range(1, 9), scheme)
    adapter = Adapter("adapter-1", "/models/adapter-1")
    got = {
        "NONE": root_hash(scheme),
        "A": plain[0],
        "B": plain[1],
        "S": hash_tokens((1, 2, 3, 4), scheme, cache_salt="tenant-a")[0],
        "L": hash_tokens((1, 2, 3, 4), scheme, cache_salt="tenant-a", adapter=adapter)[0],
        "T16": hash_tokens(range(16), HashScheme(algorithm=algorithm, seed=seed, block_size=16))[0],
    }
    assert {name: got[name].hex() for name in expected} == expected


def test_long_integers_have_their_shortest_form() -> None:
    parent = root_hash(HashScheme())
    digest = hash_block("sha256_cbor", parent, (1, 2, 3, 300, 70000), (("cache_salt", "t"),))
    assert digest.hex() == "335ac146dec7d44f32df7ed6d6de80ace3fef26e3dfe6bb2033450a144934756"


EDGES = (0, 23, 24, 255, 256, 65_535, 65_536, 2**18 - 1, 2**18, 2**32 - 1, 2**32, 2**63)
token_ids = st.one_of(st.sampled_from(EDGES), st.integers(0, 400), st.integers(0, 2**34))


@given(tokens=st.lists(token_ids, max_size=40), size=st.sampled_from([1, 2, 16]))
def test_a_block_is_the_digest_of_its_canonical_cbor(tokens: list[int], size: int) -> None:
    scheme = HashScheme(block_size=size)
    parent, expected = root_hash(scheme), []
    for first in range(0, len(tokens) - size + 1, size):
        block = canonical_cbor((parent, tokens[first : first + size], None))
        parent = BlockHash(hashlib.sha256(block).digest())
        expected.append(parent)
    assert hash_tokens(tokens, scheme) == expected


@pytest.mark.parametrize("negative", [-1, -2, -100, -50_000, -(2**40)])
@pytest.mark.parametrize("size", [1, 4])
def test_a_negative_token_is_refused_whatever_was_hashed_before(negative: int, size: int) -> None:
    scheme = HashScheme(block_size=size)
    hash_tokens(range(50_000), scheme)
    with pytest.raises(ValueError, match=f"token id {negative} is negative"):
        hash_tokens([1, 2, negative, 4], scheme)


def test_short_form_is_the_last_eight_bytes() -> None:
    scheme = HashScheme(block_size=4)
    assert [short_hash(h) for h in hash_tokens(range(1, 9), scheme)] == [
        9561501211280363793,
        15292913576410714033,
    ]


@pytest.mark.fault("engine-14")
def test_equal_content_hashes_equally_whatever_the_objects_are() -> None:
    scheme = HashScheme(block_size=4)
    same = "adapter"
    twin = "".join(["adap", "ter"])
    assert hash_tokens([True, 2, 3, 4], scheme) == hash_tokens([1, 2, 3, 4], scheme)
    assert hash_tokens([1, 2, 3, 4], scheme, adapter=Adapter(same, same)) == hash_tokens(
        [1, 2, 3, 4], scheme, adapter=Adapter(same, twin)
    )


@pytest.mark.fault("engine-12")
@pytest.mark.fault("router-18")
def test_a_salt_and_an_adapter_of_one_name_hash_differently() -> None:
    scheme = HashScheme(block_size=4)
    salted = hash_tokens([1, 2, 3, 4], scheme, cache_salt="X")
    adapted = hash_tokens([1, 2, 3, 4], scheme, adapter=Adapter("X", "X"))
    assert salted != adapted


def test_the_salt_of_the_first_block_separates_every_later_one() -> None:
    scheme = HashScheme(block_size=4)
    plain = hash_tokens(range(12), scheme)
    salted = hash_tokens(range(12), scheme, cache_salt="a")
    assert not set(plain) & set(salted)


@pytest.mark.fault("router-12")
def test_the_same_block_in_another_place_has_another_hash() -> None:
    scheme = HashScheme(block_size=2)
    assert hash_tokens([1, 2, 7, 8], scheme)[1] != hash_tokens([7, 8], scheme)[0]


@pytest.mark.fault("router-20")
def test_prompts_of_one_length_but_other_tokens_have_other_hashes() -> None:
    scheme = HashScheme()
    assert not set(hash_tokens(range(100), scheme)) & set(hash_tokens(range(1, 101), scheme))

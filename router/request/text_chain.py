"""A chain of hashes over the text of a prompt, for engines whose tokenizer nobody here has.

It stands in for the hash chain of tokens: equal chains mean equal beginnings of the raw JSON that
the client sent, under one cache salt. It is good for a guess and never leaves the gateway.
"""

from __future__ import annotations

import hashlib

BLOCK_BYTES = 256
_DIGEST_BYTES = 16


def text_chain(text: bytes, *, cache_salt: str) -> tuple[bytes, ...]:
    """Return one hash for each full block of a text, each covering all before it."""
    root = hashlib.blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()
    chain = hashlib.blake2b(root, digest_size=_DIGEST_BYTES)
    hashes: list[bytes] = []
    for first in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain.update(text[first : first + BLOCK_BYTES])
        hashes.append(chain.digest())
    return tuple(hashes)

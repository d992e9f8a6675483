"""A chain of hashes over the text of a prompt, for engines whose tokenizer nobody here has.

It stands in for the hash chain of tokens: equal chains mean equal beginnings of the raw JSON that
the client sent, under one cache salt. It is good for a guess and never leaves the gateway.
"""

from __future__ import annotations

BLOCK_BYTES = 256


def text_chain(text: bytes, *, cache_salt: str) -> tuple[bytes, ...]:
    """Return one hash for each full block of a text, each covering all before it.

    They are Python's own, of 64 bits and under a key of this process: a digest takes twice as long.
    """
    chain = hash(cache_salt)
    hashes: list[bytes] = []
    for first in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hash((chain, text[first : first + BLOCK_BYTES]))
        hashes.append(chain.to_bytes(8, "big", signed=True))
    return tuple(hashes)

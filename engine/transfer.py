"""Moves of whole blocks that a step carries out before it computes.

They are applied one after the other, in the order in which they were decided: a later one may
read what an earlier one wrote, or overwrite what it read. Block ids address the pool, host block
ids the host tier (host_tier.py); both hold blocks of the same layout.
"""

from __future__ import annotations

import msgspec


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy the whole contents of one block of the pool to another."""

    source: int
    destination: int


class HostStore(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Copy a block of the pool to the host tier."""

    block_id: int
    host_block_id: int


class HostLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Copy a block of the host tier to the pool."""

    host_block_id: int
    block_id: int


BlockTransfer = BlockCopy | HostStore | HostLoad

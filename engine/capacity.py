"""Who must give blocks back before a pool shrinks; arithmetic over block tables, no effects."""

from __future__ import annotations

from collections.abc import Mapping

from engine.kv_groups.block_table import RequestTable


def displaced_by(num_blocks: int, tables: Mapping[str, RequestTable]) -> list[str]:
    """List the requests that cannot stay in a pool of `num_blocks`, in the order of `tables`.

    Those that hold a block beyond; and, when what is left of the pool would not cover all
    reserves, those with one. O(blocks in use).
    """
    held = {
        request_id: {block_id for ids in table.block_ids for block_id in ids if block_id}
        for request_id, table in tables.items()
    }
    staying = {r: ids for r, ids in held.items() if max(ids, default=0) < num_blocks}
    in_use = set[int]().union(*staying.values())
    num_reserved = sum(tables[request_id].num_reserved for request_id in staying)
    if num_reserved > num_blocks - 1 - len(in_use):
        staying = {r: ids for r, ids in staying.items() if not tables[r].num_reserved}
    return [request_id for request_id in tables if request_id not in staying]

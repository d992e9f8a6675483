"""Which states of a request stay in the cache: those that another request is likely to begin with.

A state is as large as the keys of many tokens, and a request leaves one with every chunk of its
prompt and every full block of its output. Arithmetic over a block table; it touches no pool.
"""

from __future__ import annotations

from engine.block import Block
from engine.kv_groups.block_table import LeftState, RequestTable
from engine.kv_groups.group import KVGroup
from engine.pending_run import PendingRun
from engine.request import Request


def note_states(table: RequestTable, group: KVGroup, request: Request, run: PendingRun) -> None:
    """Remember the states in `run`, the latest of a state group that were queued for commit.

    Those at the last full block of the prompt, and where others leave this chain, last.
    """
    held, size = table.groups[group.index], group.block_size
    lasting = {num_tokens // size for num_tokens in table.partings}
    if not request.is_open:
        lasting.add(request.num_prompt_tokens // size)
    first = held.num_queued * request.chain.block_size // size - len(run.blocks)
    held.states += [
        LeftState(block, generation, block_hash, number * size, number in lasting)
        for number, (block, generation, block_hash) in enumerate(
            zip(run.blocks, run.generations, run.hashes, strict=True), start=first + 1
        )
        if block.block_id
    ]


def take_replaced(states: list[LeftState], num_tokens: int) -> list[Block]:
    """Return the blocks whose states need not be found any more, with `num_tokens` computed.

    The latest state that is cached stays, and so does what lasts or what somebody has hit; of all
    these but the latest, `states` holds nothing afterwards.
    """
    num_done = sum(state.num_tokens <= num_tokens for state in states)
    cached = [state for state in states[:num_done] if state.is_cached]
    states[:num_done] = cached[-1:]
    return [s.block for s in cached[:-1] if not (s.lasts or s.block.was_hit)]

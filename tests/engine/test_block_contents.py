"""Events with contents: whoever reads them alone knows what the engine holds, hash by hash."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.core import EngineCore
from engine.messages import EngineRequest, LoRARequest
from kvindex.events import BlockStored, EventBatch, KVEvent, decode_batch, encode_batch
from kvindex.foreign_inventory import ForeignInventory
from kvindex.hashing import Adapter, hash_tokens
from tests.engine.build import make_core, make_request, pressing_requests, run
from tests.engine.hybrid import GROUPS, make_hybrid_core

SQL = LoRARequest("sql", "/adapters/sql", "d1")


def decoded(told: list[KVEvent]) -> EventBatch:
    """Send events through the wire format."""
    return decode_batch(encode_batch(EventBatch(0.0, told, 0))).batch


def stored(core: EngineCore, request: EngineRequest) -> list[BlockStored]:
    """Run a request and return what is announced, with contents."""
    contents = core.kv_cache.keep_contents()
    run(core, request)
    told = contents.told(core.take_events())
    return [e for e in decoded(told).events if isinstance(e, BlockStored)]


def test_a_run_of_blocks_is_announced_with_its_tokens() -> None:
    core = make_core()
    (event,) = stored(core, make_request("a", range(10), max_tokens=1))
    assert event == BlockStored(
        block_hashes=[*hash_tokens(range(8), core.config.hash_scheme)],
        parent_block_hash=None,
        token_ids=[*range(8)],
        block_size=4,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_salt_and_adapter_are_told_as_vllm_tells_them() -> None:
    request = msgspec.structs.replace(
        make_request("a", range(10), max_tokens=1, salt="pepper"), lora=SQL
    )
    (event,) = stored(make_core(), request)
    assert (event.lora_name, event.extra_keys) == ("sql", [["sql", "pepper"], ["sql"]])


def test_without_being_asked_events_carry_no_tokens() -> None:
    core = make_core()
    run(core, make_request("a", range(10)))
    assert {tuple(e.token_ids) for e in core.take_events() if isinstance(e, BlockStored)} == {()}


@pytest.mark.parametrize("groups", ["full+window", "full+state"])
def test_each_group_says_what_its_layers_read(groups: str) -> None:
    core = make_hybrid_core(GROUPS[groups])
    events = stored(core, make_request("a", range(17), max_tokens=1))
    told = {
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, e.block_size)
        for e in events
    }
    other = {"full+window": (1, "sliding_window", 6, 4), "full+state": (1, "mamba", None, 8)}
    assert told == {(0, "full_attention", None, 4), other[groups]}
    for event in events:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_host_blocks", [0, 12])
@pytest.mark.parametrize("async_depth", [0, 2])
def test_the_events_alone_rebuild_the_pool_under_pressure(
    seed: int, num_host_blocks: int, async_depth: int
) -> None:
    core = make_core(num_blocks=14, num_host_blocks=num_host_blocks, async_depth=async_depth)
    contents = core.kv_cache.keep_contents()
    scheme = core.config.hash_scheme
    inventory = ForeignInventory(scheme, adapters={"sql": Adapter("sql", "/adapters/sql")})
    rng = random.Random(seed)
    for i, request in enumerate(pressing_requests(12, seed=seed)):
        salt = rng.choice([None, "a", "b"])
        lora = rng.choice([None, None, SQL])
        core.add(msgspec.structs.replace(request, cache_salt=salt, lora=lora))
        if i % 3 == 0:
            core.step()
            inventory.apply(decoded(contents.told(core.take_events())))
    while core.has_work:
        core.step()
        inventory.apply(decoded(contents.told(core.take_events())))
    held = {(entry.tier, entry.block_hash) for entry in core.snapshot_entries()}
    assert held == {(op.tier, h) for op in inventory.snapshot() for h in op.hashes}
    assert held
    assert inventory.counters.num_orphans == inventory.counters.num_masked == 0


def test_what_is_cleared_is_forgotten_and_told_anew() -> None:
    core = make_core()
    contents = core.kv_cache.keep_contents()
    run(core, make_request("a", range(10)))
    contents.told(core.take_events())
    assert core.reset_prefix_cache(preempt_running=False)
    run(core, make_request("b", range(10), max_tokens=1))
    _, again = contents.told(core.take_events())
    assert isinstance(again, BlockStored)
    assert again.token_ids == [*range(8)]

"""Requests with an adapter: their own hash chain, their own blocks, and events that name it."""

from __future__ import annotations

import msgspec
import pytest

from engine.core import EngineCore
from engine.messages import EngineRequest, LoRARequest
from kvindex.events import BlockStored, EventBatch, decode_batch, encode_batch
from kvindex.hashing import Adapter, hash_tokens
from tests.engine.build import make_core, make_request, run

SQL = LoRARequest("sql", "/adapters/sql", "d1")
POETRY = LoRARequest("poetry", "/adapters/poetry", "d2")


def adapted(request_id: str, lora: LoRARequest | None) -> EngineRequest:
    """Build a request of 20 tokens for an adapter, or for the model itself."""
    return msgspec.structs.replace(make_request(request_id, range(20)), lora=lora)


def stored_events(core: EngineCore) -> list[BlockStored]:
    """Take the events that announce blocks, as they come out of the wire format."""
    payload = encode_batch(EventBatch(0.0, core.take_events(), 0))
    events = decode_batch(payload).batch.events
    return [event for event in events if isinstance(event, BlockStored)]


@pytest.mark.fault("engine-18")
def test_blocks_of_an_adapter_are_announced_with_its_name() -> None:
    core = make_core()
    run(core, adapted("a", SQL))
    (stored,) = stored_events(core)
    assert (stored.lora_name, stored.lora_id) == ("sql", None)
    expected = hash_tokens(
        range(20), core.config.hash_scheme, adapter=Adapter("sql", "/adapters/sql")
    )
    assert stored.block_hashes[:5] == expected[:5]


@pytest.mark.fault("engine-18")
def test_blocks_without_an_adapter_name_none() -> None:
    core = make_core()
    run(core, adapted("a", None))
    assert [(e.lora_name, e.lora_id) for e in stored_events(core)] == [(None, None)]


def test_a_prefix_is_shared_within_an_adapter_only() -> None:
    core = make_core()
    assert run(core, adapted("base", None)).cached == {"base": 0}
    assert run(core, adapted("sql", SQL)).cached == {"sql": 0}
    assert run(core, adapted("poetry", POETRY)).cached == {"poetry": 0}
    assert run(core, adapted("sql again", SQL)).cached == {"sql again": 16}


def test_the_same_name_in_another_folder_shares_nothing() -> None:
    core = make_core()
    run(core, adapted("a", SQL))
    moved = LoRARequest("sql", "/adapters/sql-v2")
    assert run(core, adapted("b", moved)).cached == {"b": 0}


def test_a_block_that_comes_back_from_the_host_still_names_its_adapter() -> None:
    core = make_core(num_blocks=8, num_host_blocks=32)
    run(core, adapted("sql", SQL))
    core.take_events()
    run(core, make_request("flood", range(100, 124)))
    on_host = [e.lora_name for e in stored_events(core) if e.medium == "CPU"]
    assert on_host
    assert set(on_host) == {"sql"}
    run(core, adapted("sql again", SQL))
    back = [e for e in stored_events(core) if e.medium == "GPU" and e.lora_name == "sql"]
    assert back


def test_the_runner_is_told_which_adapter_a_request_has() -> None:
    core = make_core()
    core.add(adapted("a", SQL))
    core.add(adapted("b", None))
    step = core.scheduler.schedule()
    assert {new.request_id: new.lora for new in step.new_requests} == {"a": SQL, "b": None}

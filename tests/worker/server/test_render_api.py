"""What routers of other make ask a replica: prompts as tokens, and where its events are."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from tests.worker.server.replica import replica_spec, running_replica
from worker.config import KvEventsConfig
from worker.server.engine_start import core_spec


async def test_a_prompt_is_rendered_as_it_would_be_computed() -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": ["the cat", "a dog"], "max_tokens": 1}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with running_replica() as replica:
        status, prompts = await replica.post("/v1/completions/render", body)
        assert status == 200
        _, whole = await replica.post("/tokenize", {"model": "tiny", "prompt": "the cat"})
        assert prompts[0]["token_ids"] == whole["tokens"]
        assert len(prompts) == 2
        status, rendered = await replica.post("/v1/chat/completions/render", chat)
        assert status == 200
        _, whole = await replica.post("/tokenize", chat)
        assert (rendered["model"], rendered["token_ids"]) == ("tiny", whole["tokens"])
        status, refused = await replica.post("/v1/chat/completions/render", {**chat, "model": "x"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")


async def test_who_announces_nothing_names_no_source() -> None:
    async with running_replica() as replica:
        assert await replica.get("/kv_event_sources") == (200, {})


def test_each_core_announces_on_ports_of_its_own() -> None:
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:5557", topic="kv"
    )
    spec = replica_spec(kv_events=config, data_parallel_size=2)
    found = [core_spec(spec, dp_rank=rank).announce for rank in (0, 1)]
    assert [(a.endpoint, a.replay_endpoint, a.topic) for a in found if a is not None] == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:*", "kv"),
        ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:*", "kv"),
    ]
    assert core_spec(replica_spec()).announce is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "tcp://*:5557"}, "whoever reaches it can read prompts and cache salts"),
        ({"replay_endpoint": "tcp://10.0.0.7:5558"}, "or set allow_remote: true"),
        ({"endpoint": "5557"}, "worker.kv_events.endpoint is '5557'; expected tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "expected tcp://HOST:PORT"),
    ],
)
def test_events_with_tokens_stay_on_the_machine_unless_they_are_let_out(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"worker\.kv_events") as caught:
        KvEventsConfig(**fields)
    assert message in str(caught.value)


def test_they_may_be_let_out() -> None:
    assert KvEventsConfig(endpoint="tcp://*:5557", allow_remote=True).endpoint == "tcp://*:5557"

"""The client without an event loop: the same tokens, refusals and cache as the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.frontend.errors import RequestError
from engine.messages import EngineOutput
from kvindex.hashing import hash_tokens
from tests.engine.build import alone, make_request
from tests.worker.core.build import CONFIG, scripted_spec
from worker.core.sync_client import SyncProcessClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncProcessClient]:
    with SyncProcessClient(scripted_spec(), socket_dir=tmp_path / "sockets") as made:
        yield made


def test_many_requests_at_once_get_their_own_tokens(client: SyncProcessClient) -> None:
    requests = [make_request(f"r{i}", range(i, i + 9), max_tokens=6) for i in range(5)]
    tokens: dict[str, list[int]] = {}
    for output in client.generate(requests):
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {request.request_id: alone(request) for request in requests}


def test_a_refusal_is_an_output_and_the_others_are_served(client: SyncProcessClient) -> None:
    requests = [make_request("long", [1] * 300), make_request("ok", [1])]
    outputs = list(client.generate(requests))
    (refused,) = (output for output in outputs if output.finish_reason == "error")
    assert (refused.request_id, refused.error_kind) == ("long", "context_length_exceeded")
    assert sum(len(output.token_ids) for output in outputs) == 4


def test_leaving_early_aborts_what_runs(client: SyncProcessClient) -> None:
    outputs: Iterator[EngineOutput] = client.generate([make_request("a", [1] * 9, max_tokens=200)])
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert client.reset_prefix_cache(preempt_running=False)


def test_nothing_comes_of_nothing_until_the_time_is_up(client: SyncProcessClient) -> None:
    assert client.poll(0.05) == []
    client.abort(["unknown"])
    assert client.poll(0) == []


def test_snapshot_and_reset_between_outputs(client: SyncProcessClient) -> None:
    client.add([make_request("a", range(13), max_tokens=1)])
    while not client.poll(1.0):
        pass
    entries = client.snapshot().entries
    assert {e.block_hash for e in entries} == set(hash_tokens(range(13), CONFIG.hash_scheme))
    assert client.reset_prefix_cache(preempt_running=False)
    assert client.snapshot().entries == []
    assert client.info.num_blocks == client.stats.num_blocks == 63


def test_a_paused_engine_computes_nothing_until_it_is_resumed(client: SyncProcessClient) -> None:
    request = make_request("a", range(9), tenant="acme")
    client.pause("all")
    client.add([request])
    assert client.poll(0.05) == []
    client.resume()
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += [token for output in client.poll(1.0) for token in output.token_ids]
    assert tokens == alone(request)
    assert client.tenant_stats()["acme"].generation_tokens_total == 4


def test_a_closed_client_refuses_and_may_be_closed_again(client: SyncProcessClient) -> None:
    client.close()
    client.close()
    for use in (
        lambda: client.add([make_request("a", [1])]),
        lambda: client.poll(0),
        client.snapshot,
    ):
        with pytest.raises(RequestError, match="the engine was closed"):
            use()

"""What a client sees of a running fleet: OpenAI's behaviour, prefix hits, isolation, refusals."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec
import openai
import pytest

from router.observe.decisions import DecisionRecord
from router.policy.choice import replayed
from router.policy.registry import build_policy
from router.policy.types import Place
from tests.e2e.fleet_process import FleetProcess, Reply, http, until

pytestmark = pytest.mark.slow

IGNORE_EOS: dict[str, Any] = {"ignore_eos": True}


def completion(prompt: list[int] | str, **more: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def cached_tokens(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    count: int = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def predicted(reply: Reply) -> int:
    return int(reply.headers["x-prefixfleet-cached-tokens-predicted"])


@pytest.fixture
def client(fleet: FleetProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.file.url}/v1", api_key=fleet.key(), max_retries=0)


def test_the_openai_client_chats_streams_completes_and_lists_models(
    client: openai.OpenAI,
) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=IGNORE_EOS
    )
    assert chat.usage is not None
    assert (chat.choices[0].finish_reason, chat.usage.completion_tokens) == ("length", 8)
    chunks = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IGNORE_EOS,
    )
    received = list(chunks)
    text = "".join(c.choices[0].delta.content or "" for c in received if c.choices)
    assert text == chat.choices[0].message.content
    assert received[-1].usage is not None
    assert received[-1].usage.completion_tokens == 8
    done = client.completions.create(
        model="tiny", prompt="hello", max_tokens=3, temperature=0, extra_body=IGNORE_EOS
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == 3
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_refusals_have_openais_shape_and_status(fleet: FleetProcess, client: openai.OpenAI) -> None:
    stranger = openai.OpenAI(base_url=f"{fleet.file.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        stranger.models.list()
    assert wrong_key.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown_model:
        client.completions.create(model="huge", prompt="hello")
    assert unknown_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[65] * 9000)
    assert too_long.value.code == "context_length_exceeded"
    url = f"{fleet.file.url}/v1/completions"
    malformed = http(url, key=fleet.key(), raw=b'{"model": "tiny", ')
    assert malformed.status == 400
    assert malformed.body["error"]["type"] == "invalid_request_error"
    assert http(f"{fleet.file.url}/nowhere", key=fleet.key()).status == 404


def test_a_shared_prefix_goes_to_the_same_replica_as_predicted_and_to_one_tenant_only(
    fleet: FleetProcess,
) -> None:
    prefix = [(7 * i) % 250 for i in range(640)]
    first = fleet.post("/v1/completions", completion([*prefix, *range(40)]))
    assert (cached_tokens(first), predicted(first)) == (0, 0)
    second = fleet.post("/v1/completions", completion([*prefix, *range(100, 150)]))
    assert second.headers["x-prefixfleet-replica"] == first.headers["x-prefixfleet-replica"]
    assert second.headers["x-prefixfleet-mode"] == "EXACT"
    assert (cached_tokens(second), predicted(second)) == (640, 640)
    other = fleet.post("/v1/completions", completion([*prefix, *range(40)]), tenant="globex")
    assert (cached_tokens(other), predicted(other)) == (0, 0)
    for replica in fleet.file.replicas:
        reset = fleet.command("replica", "reset-cache", replica.id)
        assert reset.stdout == f"{replica.id}: cache reset\n", reset.stderr
    again = fleet.post("/v1/completions", completion([*prefix, *range(100, 150)]))
    assert (cached_tokens(again), predicted(again)) == (0, 0)


@pytest.mark.fault("router-58")
def test_a_recorded_decision_reproduces_the_choice(fleet: FleetProcess) -> None:
    reply = fleet.post("/v1/completions", completion([3] * 100))
    body = fleet.admin(f"/admin/decisions/{reply.headers['x-request-id']}").body
    record = msgspec.convert(body, DecisionRecord)
    attempt = record.attempts[0]
    decision, request = attempt.decision, attempt.request
    assert isinstance(decision, Place)
    assert request is not None
    policy = build_policy(decision.policy, decision.params, owner="this test")
    assert replayed(decision, request, policy, gateway=record.gateway) == decision.winner.target
    assert [c.score for c in decision.candidates] == policy.scores(request, decision.candidates)
    assert len(decision.candidates) == 2
    assert str(decision.winner.target.replica) in reply.headers["x-prefixfleet-replica"]


def test_a_look_at_the_fleet_that_is_piped_has_whole_request_ids(fleet: FleetProcess) -> None:
    reply = fleet.post("/v1/completions", completion(list(range(8))))
    shown = fleet.command("top", "--once").stdout
    assert reply.headers["x-request-id"] in shown.split()


def test_a_replica_refuses_whoever_lacks_the_internal_token(fleet: FleetProcess) -> None:
    url = fleet.file.replicas[0].url
    for key in (None, "", fleet.key(), fleet.file.admin_key):
        reply = http(f"{url}/v1/completions", key=key, body=completion("hello"))
        assert reply.status == 401
        assert reply.body["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/metrics", "/kv/snapshot", "/tokenizer"):
        assert http(f"{url}{path}").status == 401
    assert http(f"{url}/health").status == 200


@pytest.mark.fault("router-41")
def test_a_client_that_leaves_mid_stream_frees_the_engine(fleet: FleetProcess) -> None:
    body = json.dumps(completion("hello", max_tokens=8000, stream=True)).encode()
    address = urlsplit(fleet.file.url)
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: fleet\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {fleet.key()}\r\n".encode()
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
        assert sum(active_requests(fleet)) == 1
    until(lambda: sum(active_requests(fleet)) == 0, "the gateway counts nothing", within_s=1.0)
    until(lambda: sum(running_requests(fleet)) == 0, "the engines run nothing", within_s=3.0)


def replicas(fleet: FleetProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.admin("/admin/replicas").body["replicas"]
    return found


def active_requests(fleet: FleetProcess) -> list[int]:
    return [replica["num_active"] for replica in replicas(fleet)]


def running_requests(fleet: FleetProcess) -> list[int]:
    """What the engines say of themselves; it is as old as a lease renewal, 0.5 s here."""
    return [replica["report"]["num_running"] for replica in replicas(fleet)]


def test_a_tenants_key_opens_nothing_of_the_admin_api(fleet: FleetProcess) -> None:
    for key in (None, fleet.key()):
        assert http(f"{fleet.file.admin_url}/admin/replicas", key=key).status == 401


def test_no_clear_key_is_on_disk_except_in_fleet_json(fleet: FleetProcess) -> None:
    holders = {
        path.name
        for path in fleet.run_dir.rglob("*")
        if path.is_file() and fleet.key().encode() in path.read_bytes()
    }
    assert holders == {"fleet.json"}

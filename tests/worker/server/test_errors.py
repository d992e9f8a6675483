"""Every refusal in OpenAI's shape, from every path, and no door without its token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.config import EngineConfig
from tests.engine.frontend.tiny_tokenizer import VOCAB_SIZE
from tests.worker.server.replica import RunningReplica, running_replica

BODY: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 2}
EVERY_ROUTE = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/model_info"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("GET", "/kv_event_sources"),
    ("GET", "/metrics"),
    ("GET", "/kv/snapshot"),
    ("POST", "/kv/rebuild"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/tokenizer"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nowhere"),
]


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica(max_body_bytes=10_000) as running:
        yield running


def error_of(answer: Any) -> tuple[str, str | None, str | None]:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["type"], error["param"], error["code"]


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/nowhere", {}, 404, ("invalid_request_error", None, "not_found")),
        ("/health", {}, 405, ("invalid_request_error", None, "method_not_allowed")),
        ("/v1/completions", b"{", 400, ("invalid_request_error", None, None)),
        ("/v1/completions", b"\xff", 400, ("invalid_request_error", None, None)),
        (
            "/v1/completions",
            b"x" * 10_001,
            413,
            ("invalid_request_error", None, "payload_too_large"),
        ),
        (
            "/v1/completions",
            BODY | {"model": "other"},
            404,
            ("invalid_request_error", "model", "model_not_found"),
        ),
        (
            "/v1/completions",
            BODY | {"prompt": "a" * 600},
            400,
            ("invalid_request_error", "prompt", "context_length_exceeded"),
        ),
        (
            "/v1/completions",
            BODY | {"max_tokens": 600},
            400,
            ("invalid_request_error", "max_tokens", "context_length_exceeded"),
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "a" * 7000}]},
            400,
            ("invalid_request_error", "messages", "context_length_exceeded"),
        ),
        (
            "/v1/completions",
            BODY | {"prefixfleet": {"request_id": "x"}},
            400,
            ("invalid_request_error", "prefixfleet", None),
        ),
        ("/tokenize", {"prompt": 3}, 400, ("invalid_request_error", "prompt", None)),
        ("/tokenize", {}, 400, ("invalid_request_error", "prompt", None)),
        ("/detokenize", {"tokens": [-1]}, 400, ("invalid_request_error", "tokens[0]", None)),
        (
            "/reset_prefix_cache?reset_running_requests=maybe",
            b"",
            400,
            ("invalid_request_error", "reset_running_requests", None),
        ),
    ],
)
async def test_a_refusal_has_its_status_and_openais_shape(
    replica: RunningReplica,
    path: str,
    body: Any,
    status: int,
    error: tuple[str, str | None, str | None],
) -> None:
    found, answer = await replica.post(path, body)
    assert (found, error_of(answer)) == (status, error)
    assert replica.is_idle


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 2**40])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
async def test_a_token_id_that_the_model_lacks_is_refused_and_the_engine_lives(
    replica: RunningReplica, field: str, bad: int
) -> None:
    body = BODY | {"min_tokens": 1, field: [1, bad]}
    status, answer = await replica.post("/v1/completions", body)
    assert (status, error_of(answer)[1]) == (400, f"{field}[1]")
    status, _ = await replica.post("/v1/completions", BODY)
    assert status == 200


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"logit_bias": {"3": 1, str(VOCAB_SIZE): 1}}, f"logit_bias.{VOCAB_SIZE}"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ],
)
async def test_a_token_that_cannot_be_biased_or_allowed_is_refused_and_the_engine_lives(
    replica: RunningReplica, field: dict[str, Any], param: str
) -> None:
    status, answer = await replica.post("/v1/completions", BODY | {"min_tokens": 1} | field)
    assert (status, error_of(answer)[1]) == (400, param)
    status, _ = await replica.post("/v1/completions", BODY)
    assert status == 200


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize("bad", [[], [-1], [VOCAB_SIZE]])
async def test_the_gateways_token_ids_are_checked_too(bad: list[int]) -> None:
    async with running_replica(internal_token="t") as replica:
        body = BODY | {"prefixfleet": {"request_id": "x", "prompt_token_ids": bad}}
        status, answer = await replica.post("/v1/completions", body, Authorization="Bearer t")
        assert status == 400
        assert error_of(answer)[1] in (
            "prefixfleet.prompt_token_ids",
            "prefixfleet.prompt_token_ids[0]",
        )


async def test_the_gateways_token_ids_cannot_stand_for_several_prompts() -> None:
    async with running_replica(internal_token="t") as replica:
        body = BODY | {"prompt": ["a", "b"]}
        body["prefixfleet"] = {"request_id": "x", "prompt_token_ids": [1]}
        status, answer = await replica.post("/v1/completions", body, Authorization="Bearer t")
        assert (status, error_of(answer)[1]) == (400, "prefixfleet.prompt_token_ids")


@pytest.mark.fault("engine-13")
async def test_an_empty_salt_is_refused(replica: RunningReplica) -> None:
    status, answer = await replica.post("/v1/completions", BODY | {"cache_salt": ""})
    assert (status, error_of(answer)[1]) == (400, "cache_salt")


async def test_another_content_type_is_refused_with_its_name(replica: RunningReplica) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = await replica.post("/v1/completions", BODY, **form)
    assert status == 400
    assert answer["error"]["message"] == (
        "Content-Type must be application/json, got application/x-www-form-urlencoded"
    )
    charset = {"Content-Type": "application/json; charset=utf-8"}
    status, _ = await replica.post("/v1/completions", BODY, **charset)
    assert status == 200


async def test_the_official_client_gets_its_own_exceptions(replica: RunningReplica) -> None:
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="x") as client:
        with pytest.raises(openai.NotFoundError, match="served: tiny"):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="context length is 512 tokens"):
            await client.completions.create(model="tiny", prompt="a" * 600, stream=True)


async def test_a_full_queue_is_429_with_a_time_to_come_back() -> None:
    engine = EngineConfig(max_num_seqs=1, max_num_queued_reqs=1)
    async with running_replica(step_s=0.02, engine=engine) as replica:
        status, answer = await replica.post(
            "/v1/completions", BODY | {"n": 3, "max_tokens": 50, "stream": True}
        )
        assert (status, error_of(answer)[2]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", "Basic t", "Bearer té"])
async def test_without_the_internal_token_every_route_but_health_is_401(shown: str) -> None:
    headers = {"Authorization": shown} if shown else {}
    async with running_replica(internal_token="t") as replica:
        for method, path in EVERY_ROUTE:
            async with replica.session.request(
                method, replica.url + path, headers=headers
            ) as response:
                assert response.status == 401
                error = error_of(await response.json())
                assert error == ("authentication_error", None, "invalid_api_key")


async def test_health_is_open_and_the_token_opens_the_rest() -> None:
    async with running_replica(internal_token="t") as replica:
        assert (await replica.get("/health"))[0] == 200
        assert (await replica.get("/v1/models", Authorization="Bearer t"))[0] == 200
        assert (await replica.get("/v1/models", Authorization="bearer t"))[0] == 200


async def test_an_api_key_guards_a_replica_on_its_own_but_brings_no_gateways_rights() -> None:
    async with running_replica(api_key="k") as replica:
        assert (await replica.get("/v1/models"))[0] == 401
        body = BODY | {"prefixfleet": {"request_id": "x"}}
        status, answer = await replica.post("/v1/completions", body, Authorization="Bearer k")
        assert (status, error_of(answer)[1]) == (400, "prefixfleet")


async def test_a_request_id_is_echoed_when_harmless_and_replaced_when_not(
    replica: RunningReplica,
) -> None:
    async def echoed(**headers: str) -> str:
        async with replica.session.get(replica.url + "/health", headers=headers) as response:
            return response.headers["x-request-id"]

    assert await echoed(**{"x-request-id": "abc-1"}) == "abc-1"
    assert len(await echoed(**{"x-request-id": "a b"})) == 32
    assert len(await echoed()) == 32


async def test_the_gateways_request_id_is_the_one_everywhere() -> None:
    async with running_replica(internal_token="t") as replica:
        body = BODY | {"prefixfleet": {"request_id": "fleet-7"}}
        async with replica.session.post(
            replica.url + "/v1/completions", json=body, headers={"Authorization": "Bearer t"}
        ) as response:
            assert response.headers["x-request-id"] == "fleet-7"
            assert (await response.json())["id"] == "cmpl-fleet-7"

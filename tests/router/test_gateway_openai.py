"""The gateway in front of two replicas, through the official client and through plain HTTP."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.frontend.openai import UNSEEN_INTERVAL
from router.request.body import FORBIDDEN
from tests.conditions import until
from tests.router.running_gateway import (
    GLOBEX_KEY,
    chat,
    completion,
    running_gateway,
)

LONG = "the long story of a lonely lighthouse keeper " * 8


async def test_a_chat_is_answered_with_the_replicas_words_and_usage() -> None:
    async with running_gateway() as running:
        client = running.client()
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}]
        )
        assert answer.choices[0].message.content == "w0 w1 w2 "
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


async def test_a_stream_ends_with_usage_only_when_the_client_asks_for_it() -> None:
    async with running_gateway() as running:
        client = running.client()
        texts, usages = [], []
        for include in (False, True):
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options={"include_usage": include},
            )
            chunks = [chunk async for chunk in stream]
            texts.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
            usages.append([c.usage.completion_tokens for c in chunks if c.usage])
            assert all(not hasattr(c, "prefixfleet") for c in chunks)
        assert texts == ["w0 w1 w2 ", "w0 w1 w2 "]
        assert usages == [[], [3]]


async def test_completions_take_texts_and_token_ids() -> None:
    async with running_gateway() as running:
        client = running.client()
        for prompt in ("hello", [104, 105]):
            answer = await client.completions.create(model="tiny", prompt=prompt)
            assert answer.choices[0].text == "w0 w1 w2 "
        sent = [r.bodies for r in running.replicas]
        ids = [body["prefixfleet"]["prompt_token_ids"] for bodies in sent for body in bodies]
        assert [104, 105] in ids


async def test_no_hit_is_predicted_for_a_prompt_that_is_to_be_scored() -> None:
    predicted = []
    async with running_gateway() as running:
        body = {"model": "tiny", "prompt": [104] * 40}
        for fields in ({}, {}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}, {}):
            status, _, headers = await running.post("/v1/completions", body | fields)
            assert status == 200
            predicted.append(headers["x-prefixfleet-cached-tokens-predicted"])
    assert predicted == ["0", "32", "0", "0", "32"]


async def test_the_second_request_goes_where_its_prefix_is_and_the_prediction_is_exact() -> None:
    async with running_gateway() as running:
        status, first, headers = await running.post("/v1/chat/completions", chat(LONG))
        assert (status, headers["x-prefixfleet-cached-tokens-predicted"]) == (200, "0")
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _, second, again = await running.post("/v1/chat/completions", chat(LONG))
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again["x-prefixfleet-replica"] == headers["x-prefixfleet-replica"]
        assert again["x-prefixfleet-mode"] == "EXACT"
        assert again["x-prefixfleet-policy"] == "prefix_cost"
        assert again["x-prefixfleet-cached-tokens-predicted"] == str(cached)
        assert cached == (second["usage"]["prompt_tokens"] - 1) // 16 * 16


@pytest.mark.fault("router-17")
async def test_another_tenant_with_the_same_text_finds_nothing_and_none_is_predicted() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat(LONG))
        _, answer, headers = await running.post("/v1/chat/completions", chat(LONG), key=GLOBEX_KEY)
        assert headers["x-prefixfleet-cached-tokens-predicted"] == "0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _, narrowed, headers = await running.post(
            "/v1/chat/completions", chat(LONG, cache_salt="mine")
        )
        assert headers["x-prefixfleet-cached-tokens-predicted"] == "0"
        assert narrowed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_reset_through_the_admin_listener_empties_a_replicas_cache() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat(LONG))
        status, body = await running.admin("/admin/replicas/r0/reset_prefix_cache", method="POST")
        assert (status, body) == (200, {"success": True})
        _, answer, headers = await running.post("/v1/chat/completions", chat(LONG))
        assert headers["x-prefixfleet-cached-tokens-predicted"] == "0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_our_replicas_get_the_token_the_salt_a_seed_and_token_ids() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat("hi", cache_salt="mine", priority=-5))
        (replica,) = running.replicas
        body, headers = replica.bodies[-1], replica.headers[-1]
        extension = body["prefixfleet"]
        assert headers["authorization"] == "Bearer internal-token-of-the-fleet"
        assert body["stream"] is True
        assert "cache_salt" not in body
        assert "priority" not in body
        assert extension["cache_salt"] != "mine"
        assert extension["tenant"] == "acme"
        assert 0 <= extension["seed"] < 2**63
        assert len(extension["prompt_token_ids"]) > 0


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_null_for_what_only_the_gateway_sets_says_nothing(name: str) -> None:
    async with running_gateway(replicas=1) as running:
        status, answer, _ = await running.post("/v1/chat/completions", chat("hi", **{name: None}))
        assert status == 200, answer
        assert {*FORBIDDEN} & {*running.replicas[0].bodies[-1]} == {"prefixfleet"}


async def test_what_a_client_gets_whole_comes_in_fewer_chunks() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat("hi", stream_interval=2))
        assert running.replicas[0].bodies[-1]["stream_interval"] == UNSEEN_INTERVAL
        for asked in ({"stream_interval": 2}, {}):
            stream = await running.client().chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_body=asked,
            )
            assert [chunk async for chunk in stream]
            assert running.replicas[0].bodies[-1].get("stream_interval") == asked.get(
                "stream_interval"
            )


async def test_the_official_client_meets_the_errors_it_knows() -> None:
    async with running_gateway() as running:
        client = running.client()
        hello: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.AuthenticationError) as wrong_key:
            await running.client("sk-wrong").chat.completions.create(model="tiny", messages=hello)
        assert wrong_key.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-9", messages=hello)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model="tiny", prompt=[1] * 600)
        assert too_long.value.code == "context_length_exceeded"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")
        assert sum(len(replica.bodies) for replica in running.replicas) == 0


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{", None, "the body is not valid JSON"),
        (b"[1]", "body", "Expected object"),
        (chat("x", prefixfleet={"request_id": "r"}), "prefixfleet", "is set by the gateway"),
        (chat("x", kv_transfer_params={}), "kv_transfer_params", "is set by the gateway"),
        (chat("x", vllm_xargs={}), "vllm_xargs", "is set by the gateway"),
        (chat("x", cache_salt=""), "cache_salt", "must not be empty"),
        (chat("x", max_tokens="ten"), "max_tokens", "expected int"),
        (chat("x", temperature=9), "temperature", "must be between 0 and 2"),
        (chat("x", tools=[{"type": "function"}]), "tools[0].function", "must be an object"),
        ({"messages": []}, "model", "is required"),
    ],
)
async def test_bad_bodies_name_the_field(body: object, param: str | None, says: str) -> None:
    async with running_gateway(replicas=1) as running:
        status, answer, _ = await running.post("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["param"] == param
        assert says in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


async def test_every_wrong_turn_has_openais_shape() -> None:
    async with running_gateway(replicas=1) as running:
        cases = {
            ("POST", "/v1/nothing"): (404, "not_found"),
            ("GET", "/v1/chat/completions"): (405, "method_not_allowed"),
        }
        for (method, path), (status, code) in cases.items():
            async with running.session.request(method, running.url + path) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (status, code)
                assert len(response.headers["x-request-id"]) == 32
        small = running.gateway.config.max_body_bytes
        status, answer, _ = await running.post("/v1/completions", b"x" * (small + 1))
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")
        status, answer, _ = await running.post(
            "/v1/completions", b"a=b", **{"content-type": "application/x-www-form-urlencoded"}
        )
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_sane_request_id_is_echoed_and_explained_and_another_is_replaced() -> None:
    async with running_gateway() as running:
        _, _, headers = await running.post(
            "/v1/completions", completion("hi"), **{"x-request-id": "order-66"}
        )
        assert headers["x-request-id"] == "order-66"
        status, record = await running.admin("/admin/decisions/order-66")
        assert (status, record["status"], record["tenant"]) == (200, 200, "acme")
        (attempt,) = record["attempts"]
        names = {c["target"]["replica"] for c in attempt["decision"]["candidates"]}
        assert names == {"r0", "r1"}
        scores = {c["target"]["replica"]: c["score"] for c in attempt["decision"]["candidates"]}
        winner = attempt["decision"]["winner"]["target"]["replica"]
        assert winner == headers["x-prefixfleet-replica"]
        assert scores[winner] == min(scores.values())
        _, _, headers = await running.post(
            "/v1/completions", completion("hi"), **{"x-request-id": "two words"}
        )
        assert len(headers["x-request-id"]) == 32


async def test_admin_routes_want_the_admin_key_and_list_the_fleet() -> None:
    async with running_gateway() as running:
        for key in (None, "sk-acme-0123456789"):
            status, body = await running.admin("/admin/replicas", key=key)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        status, listed = await running.admin("/admin/replicas")
        assert status == 200
        assert [r["id"] for r in listed["replicas"]] == ["r0", "r1"]
        await until(lambda: running.gateway.view.mode == "EXACT")
        status, body = await running.admin("/health", key=None)
        assert (status, body["mode"], body["num_live_replicas"]) == (200, "EXACT", 2)
        status, body = await running.admin("/admin/replicas/r9/reset_prefix_cache", method="POST")
        assert (status, body["error"]["message"]) == (404, "no replica 'r9'; there are: r0, r1")


async def test_metrics_tell_requests_tokens_and_modes() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat(LONG))
        await running.post("/v1/chat/completions", chat(LONG))
        await running.post("/v1/chat/completions", chat("x", model="made-up-by-a-client"))
        _, text = await running.admin("/metrics", key=None)
        await running.post("/v1/chat/completions", chat("x"), key="sk-wrong")
        _, text = await running.admin("/metrics", key=None)
        lines = set(text.splitlines())
        refused = 'model="unknown",policy="none",status="401",tenant="unknown"'
        assert f"prefixfleet_requests_total{{{refused}}} 1.0" in lines
        served = 'model="tiny",policy="prefix_cost",status="200",tenant="acme"'
        assert f"prefixfleet_requests_total{{{served}}} 2.0" in lines
        unknown = 'model="unknown",policy="none",status="404",tenant="acme"'
        assert f"prefixfleet_requests_total{{{unknown}}} 1.0" in lines
        predicted = next(x for x in lines if x.startswith("prefixfleet_predicted_cached_tokens_t"))
        realised = next(x for x in lines if x.startswith("prefixfleet_realised_cached_tokens_to"))
        assert predicted.split()[-1] == realised.split()[-1] != "0.0"
        assert "prefixfleet_index_up 1.0" in lines
        assert 'prefixfleet_breaker_state{replica="r0",state="closed"} 1.0' in lines


async def test_a_response_is_a_chat_in_another_shape() -> None:
    async with running_gateway() as running:
        client = running.client()
        whole = await client.responses.create(model="tiny", input="hello", instructions="be kind")
        assert whole.output_text == "w0 w1 w2 "
        assert whole.usage is not None
        assert whole.usage.output_tokens == 3
        stream = await client.responses.create(model="tiny", input="hello", stream=True)
        events = [event async for event in stream]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "w0 w1 w2 "
        sent = [body for r in running.replicas for body in r.bodies]
        assert sent[0]["messages"][0] == {"role": "system", "content": "be kind"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", background=True)
        assert refused.value.param == "background"

"""The client listener: generation, models, health. One path for every generating endpoint.

Tenant, admission, preparation, dispatch and settlement are applied here and nowhere else, so no
endpoint can miss one of them.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid

from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.openai import ModelCard, ModelList
from router.api.http import REQUEST_ID, json_bytes, json_response, read_json
from router.assembly import Gateway
from router.request.auth import bearer_key
from router.request.body import Endpoint, check_foreign, read_body
from router.request.client_stream import ClientStream
from router.request.job import Job
from router.request.prepare import Prepared, estimate
from router.request.settle import CLIENT_GONE
from router.tenancy.salt import cache_salt
from router.tenancy.tenants import Identity, may_use

GATEWAY = web.AppKey("gateway", Gateway)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    return await _generate(request, "chat/completions")


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    return await _generate(request, "completions")


async def models(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models: what this key may really use."""
    return json_response(ModelList(data=list(_cards(request.app[GATEWAY], request).values())))


async def model(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models/{model}."""
    name = request.match_info["model"]
    cards = _cards(request.app[GATEWAY], request)
    if name not in cards:
        raise _unknown_model(name)
    return json_response(cards[name])


def _cards(gateway: Gateway, request: web.Request) -> dict[str, ModelCard]:
    """Describe the models that this key may really use, by name."""
    tenant = _identify(gateway, request).tenant
    isolated = tenant.isolation != "shared"
    return {
        model: ModelCard(id=model, created=gateway.started_at, max_model_len=length)
        for model, length in sorted(gateway.view.models().items())
        if may_use(tenant, model) and gateway.can_serve(model, isolated=isolated)
    }


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    with gateway.settler.refusals(request[REQUEST_ID], request.path) as refusal:
        identity = _identify(gateway, request)
        refusal.tenant = identity.tenant.name
        with gateway.admission.admit():
            body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
            job = _open_job(gateway, request, identity, endpoint, body)
            refusal.is_over = True
            return await _settled(gateway, request, job)


async def _settled(gateway: Gateway, request: web.Request, job: Job) -> web.StreamResponse:
    """Serve a job and settle it once, however it ends."""
    status = CLIENT_GONE
    try:
        response = await _serve(gateway, request, job)
        status = job.late_error.shape.status if job.late_error else response.status
        return response
    except RequestError as error:
        status = error.shape.status
        raise
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        status = 500
        raise
    finally:
        gateway.settler.settle(job, status=status)


def _identify(gateway: Gateway, request: web.Request) -> Identity:
    return gateway.directory.identify(bearer_key(request.headers), now=gateway.clock.now())


def _open_job(
    gateway: Gateway, request: web.Request, identity: Identity, endpoint: Endpoint, body: bytes
) -> Job:
    head, fields = read_body(body)
    tenant = identity.tenant
    request_id = request[REQUEST_ID]
    salt = cache_salt(gateway.fleet_secret, tenant.isolation_group, head.cache_salt)
    return Job(
        request_id=request_id,
        unique_id=f"{request_id}.{uuid.uuid4().hex[:8]}",
        tenant=tenant,
        key_alias=identity.key_alias,
        endpoint=endpoint,
        head=head,
        fields=fields,
        body=body,
        cache_salt=salt,
        seed=secrets.randbits(63),
        started_at=gateway.clock.monotonic(),
    )


async def _serve(gateway: Gateway, request: web.Request, job: Job) -> web.StreamResponse:
    _require_model(gateway, job)
    prepared = job.prepared = await _prepare(gateway, job)
    if not job.head.stream:
        body, headers = await gateway.dispatcher.whole(job, prepared)
        response = json_bytes(body)
        response.headers.update(headers)
        return response
    config = gateway.config
    async with ClientStream(
        request, keep_alive_s=config.keep_alive_s, write_timeout_s=config.write_timeout_s
    ) as stream:
        await gateway.dispatcher.stream(job, prepared, stream)
    return stream.response


def _require_model(gateway: Gateway, job: Job) -> None:
    model = job.head.model
    job.model_is_known = model in gateway.view.models()
    if job.model_is_known and may_use(job.tenant, model):
        return
    if not gateway.view.models():
        raise RequestError(
            "no_replica", "no replica has registered yet; try again shortly", retry_after_s=1.0
        )
    raise _unknown_model(model)


def _unknown_model(name: str) -> RequestError:
    return RequestError("model_not_found", f"the model {name!r} does not exist", param="model")


async def _prepare(gateway: Gateway, job: Job) -> Prepared:
    """Tokenize for replicas of ours; a model that only stock engines serve is passed through."""
    tokenizer = await gateway.tokenizer(job.head.model)
    if tokenizer is None:
        check_foreign(job.fields, job.endpoint)
        return estimate(
            job.body, num_output_tokens=job.head.max_completion_tokens or job.head.max_tokens
        )
    return await gateway.preparer.prepare(
        job.body,
        job.endpoint,
        encoder=tokenizer.encoder,
        max_model_len=tokenizer.max_model_len,
        scheme=tokenizer.scheme,
        cache_salt=job.cache_salt,
    )

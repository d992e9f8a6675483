"""The client listener: generation, models, health. One path for every generating endpoint.

Tenant, admission, preparation, dispatch and settlement are applied here and nowhere else, so no
endpoint can miss one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.openai import ModelCard, ModelList
from engine.frontend.responses_answer import ResponseStream, whole_response
from engine.frontend.responses_request import (
    ResponsesRequest,
    as_responses_error,
    parse_responses_request,
)
from kvindex.foundation.tracing import annotate, server_span, span
from router.api.http import ANSWER_HEADERS, REQUEST_ID, json_bytes, json_response, read_json
from router.assembly import Gateway
from router.request import identifiers
from router.request.auth import bearer_key
from router.request.body import Endpoint, check_foreign, read_body, with_model
from router.request.claim import CLIENT_GONE, claim_tokens
from router.request.client_stream import ClientStream
from router.request.job import Job
from router.request.limit_headers import limit_headers
from router.request.prepare import Prepared, estimate
from router.request.text_chain import text_chain
from router.tenancy.limit_reached import LimitReached
from router.tenancy.salt import cache_salt
from router.tenancy.tenancy import unknown_model
from router.tenancy.tenants import Identity

GATEWAY = web.AppKey("gateway", Gateway)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    return await _generate(request, "chat/completions")


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    return await _generate(request, "completions")


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/responses: a chat completion, shown as a response."""
    try:
        return await _generate(request, "chat/completions", parse_responses_request)
    except RequestError as error:
        raise as_responses_error(error) from None


async def models(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models: what this key may really use."""
    return json_response(ModelList(data=list((await _cards(request)).values())))


async def model(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models/{model}."""
    name = request.match_info["model"]
    cards = await _cards(request)
    if name not in cards:
        raise unknown_model(name)
    return json_response(cards[name])


async def _cards(request: web.Request) -> dict[str, ModelCard]:
    """Describe the models that this key may really use, by every name that it may use."""
    gateway = request.app[GATEWAY]
    identity = await gateway.tenancy.identify_now(bearer_key(request.headers))
    isolated, served = identity.tenant.isolation != "shared", gateway.view.models()
    return {
        name: ModelCard(id=name, created=gateway.started_at, max_model_len=served[model])
        for name, model in identity.usable(served).items()
        if gateway.can_serve(model, isolated=isolated)
    }


async def serve_as(identity: Identity, request: web.Request, body: bytes) -> bytes:
    """Serve a chat completion that is not streamed, for somebody known already."""
    gateway = request.app[GATEWAY]
    with gateway.admission.admit():
        job = await _open_job(gateway, request, identity, "chat/completions", body)
        gateway.settler.opened(job)
        response = await _settled(gateway, request, job, None, settle=_settle)
    assert isinstance(response, web.Response), "nothing was to be streamed"
    assert isinstance(response.body, bytes)
    return response.body


async def _generate(
    request: web.Request,
    endpoint: Endpoint,
    translate: Callable[[bytes], ResponsesRequest] | None = None,
) -> web.StreamResponse:
    """Serve a body; `translate` makes it one of `endpoint`, and the answer is shown accordingly."""
    gateway = request.app[GATEWAY]
    with (
        server_span("gateway.request", request.headers),
        gateway.settler.refusals(request[REQUEST_ID], request.path) as refusal,
    ):
        identity = await gateway.tenancy.identify(bearer_key(request.headers))
        refusal.tenant = identity.tenant.name
        with gateway.admission.admit():
            body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
            asked = translate(body) if translate is not None else None
            sent = body if asked is None else asked.chat
            job = await _open_job(gateway, request, identity, endpoint, sent)
            gateway.settler.opened(job)
            refusal.is_over = True
            return await _settled(gateway, request, job, asked)


def _settle(gateway: Gateway, job: Job, status: int) -> None:
    gateway.settler.settle(job, status=status)


def _settle_next(gateway: Gateway, job: Job, status: int) -> None:
    """Settle in the next turn of the event loop: the client has its answer first."""
    asyncio.get_running_loop().call_soon(_settle, gateway, job, status)


async def _settled(
    gateway: Gateway,
    request: web.Request,
    job: Job,
    asked: ResponsesRequest | None,
    *,
    settle: Callable[[Gateway, Job, int], None] = _settle_next,
) -> web.StreamResponse:
    """Serve a job and settle it once, however it ends."""
    status = CLIENT_GONE
    try:
        response = await _serve(gateway, request, job, asked)
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
        if job.matching is not None:
            job.matching.cancel()
        settle(gateway, job, status)
        annotate(
            tenant=job.tenant.name,
            model=job.head.model,
            status=status,
            request_id=job.request_id,
            attempts=len(job.attempts),
        )


async def _open_job(
    gateway: Gateway, request: web.Request, identity: Identity, endpoint: Endpoint, body: bytes
) -> Job:
    head, fields = read_body(body)
    asked_model = head.model
    identity = await gateway.tenancy.identify_for(identity, asked_model)
    served = identity.model_of(asked_model)
    head, fields = with_model(head, fields, served or asked_model)
    request_id = request[REQUEST_ID]
    salt = cache_salt(gateway.fleet_secret, identity.tenant.isolation_group, head.cache_salt)
    return Job(
        request_id=request_id,
        unique_id=f"{request_id}.{identifiers.suffix()}",
        identity=identity,
        asked_model=asked_model,
        model_is_allowed=served is not None,
        endpoint=endpoint,
        head=head,
        fields=fields,
        body=body,
        cache_salt=salt,
        seed=identifiers.seed(),
        started_at=gateway.clock.monotonic(),
    )


async def _serve(
    gateway: Gateway, request: web.Request, job: Job, asked: ResponsesRequest | None
) -> web.StreamResponse:
    _require_model(gateway, job)
    prepared = await _admit(gateway, request, job)
    if not job.head.stream:
        body, headers = await gateway.dispatcher.whole(job, prepared)
        response = json_bytes(body if asked is None else whole_response(asked, body))
        response.headers.update(headers)
        return response
    config = gateway.config
    async with ClientStream(
        request,
        keep_alive_s=config.keep_alive_s,
        write_timeout_s=config.write_timeout_s,
        shape=None if asked is None else ResponseStream(asked),
    ) as stream:
        await gateway.dispatcher.stream(job, prepared, stream)
    return stream.response


def _require_model(gateway: Gateway, job: Job) -> None:
    model = job.head.model
    job.model_is_known = model in gateway.view.models()
    if job.model_is_known and job.model_is_allowed:
        return
    if not gateway.view.models():
        raise RequestError(
            "no_replica", "no replica has registered yet; try again shortly", retry_after_s=1.0
        )
    raise unknown_model(job.asked_model)


async def _admit(gateway: Gateway, request: web.Request, job: Job) -> Prepared:
    """Let a job in by its tenant's limits; what is left of them goes into the answer, whichever."""
    try:
        await gateway.tenancy.refuse_early(job.identity)
        with span("gateway.prepare"):
            prepared = job.prepared = await _prepare(gateway, job)
        gateway.placer.ask(job, prepared)  # meanwhile, as nothing of it is kept if limits refuse
        grant = await claim_tokens(job, prepared, tenancy=gateway.tenancy, metrics=gateway.metrics)
    except LimitReached as reached:
        gateway.metrics.limit_hits.labels(job.tenant.name, reached.hit.kind).inc()
        request[ANSWER_HEADERS] = limit_headers(reached.claim, reached.verdict)
        raise
    request[ANSWER_HEADERS] = limit_headers(grant.claim, grant.verdict)
    return prepared


async def _prepare(gateway: Gateway, job: Job) -> Prepared:
    """Tokenize for replicas of ours, and for stock engines whose tokenizer is known.

    What only stock engines serve is passed through, also where we would refuse it.
    """
    tokenizer = await gateway.tokenizer(job.head.model)
    if tokenizer is None or tokenizer.is_foreign:
        check_foreign(job.fields, job.endpoint)
    if tokenizer is None:
        return _estimate(job)
    job.block_size = tokenizer.scheme.block_size
    try:
        return await gateway.preparer.prepare(
            job.body,
            job.endpoint,
            encoder=tokenizer.encoder,
            max_model_len=tokenizer.max_model_len,
            scheme=tokenizer.scheme,
            cache_salt=job.cache_salt,
            adapter=gateway.view.adapter(job.head.model),
        )
    except RequestError:
        if not tokenizer.is_foreign:
            raise
        return _estimate(job)


def _estimate(job: Job) -> Prepared:
    text = job.fields.get("messages", job.fields.get("prompt", b""))
    return estimate(
        job.body,
        num_output_tokens=job.head.max_completion_tokens or job.head.max_tokens,
        hashes=text_chain(bytes(text), cache_salt=f"{job.head.model}/{job.cache_salt}"),
    )

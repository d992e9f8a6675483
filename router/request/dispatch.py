"""Carries out plans: sends a request, tries another replica when one fails, reports the end.

Which replica is the planner's choice; this module only decides whether there is a next attempt.
A request is tried again as long as no output of it has reached the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.extension import FleetExtension
from kvindex.foundation.clock import Clock
from router.config import RouterConfig
from router.fleet.client import ReplicaClient, ReplicaFailure, Upstream
from router.request.body import body_for_foreign, body_for_ours
from router.request.chunks import Chunk, read_chunk
from router.request.client_stream import ClientStream
from router.request.collect import ChunkFold
from router.request.job import Job
from router.request.placement import Placement, Placer, note_failure
from router.request.prepare import Prepared
from router.request.relay import FoldSink, Relay, Sink, StreamSink

log = logging.getLogger("prefixfleet.router.dispatch")

MAX_DEATHS = 2
"""A request that was running on this many replicas when they died is not given to a third."""
_EXPECTED_FACTOR = 3.0

_KIND_OF_STATUS = {
    400: "invalid_request",
    405: "method_not_allowed",
    413: "payload_too_large",
    415: "unprocessable",
    422: "unprocessable",
    429: "overloaded",
}


class Dispatcher:
    """Serves prepared requests. `on_retry` is told the replica and the cause of each retry."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        placer: Placer,
        client: ReplicaClient,
        clock: Clock,
        on_retry: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._placer = placer
        self._client = client
        self._clock = clock
        self._on_retry = on_retry

    async def stream(self, job: Job, prepared: Prepared, stream: ClientStream) -> None:
        """Serve a streaming client.

        Raises RequestError only while nothing was sent; afterwards the error is the last event.
        """
        try:
            await self._attempts(
                job,
                prepared,
                lambda: StreamSink(stream, include_usage=job.head.include_usage),
                stream.offer_headers,
            )
        except RequestError as error:
            if not stream.started:
                raise
            job.late_error = error
            await stream.fail(error)
        await stream.finish()

    async def whole(self, job: Job, prepared: Prepared) -> tuple[bytes, dict[str, str]]:
        """Serve a client that waits for one answer: its body and headers."""
        headers: dict[str, str] = {}
        sinks: list[FoldSink] = []

        def fold_sink() -> Sink:
            sinks.append(FoldSink(ChunkFold(job.endpoint)))
            return sinks[-1]

        body = await self._attempts(job, prepared, fold_sink, headers.update)
        return sinks[-1].answer if body is None else body, headers

    async def _attempts(
        self,
        job: Job,
        prepared: Prepared,
        make_sink: Callable[[], Sink],
        offer_headers: Callable[[Mapping[str, str]], None],
    ) -> bytes | None:
        """Try replicas until one serves; return the body of an answer that was no stream."""
        last: ReplicaFailure | None = None
        num_deaths = 0
        for attempt in range(1, self._config.max_attempts + 1):
            try:
                placement = await self._placer.place(job, prepared, attempt=attempt)
            except RequestError:
                if last is None:
                    raise
                break
            if last is not None:
                self._on_retry(placement.replica.id, last.cause)
            offer_headers(decision_headers(job))
            sink = make_sink()
            try:
                return await self._attempt(job, prepared, placement, sink)
            except ReplicaFailure as failure:
                last = failure
                note_failure(job, str(failure))
                log.warning(
                    "attempt failed request_id=%s attempt=%d cause=%s reason=%r",
                    job.request_id,
                    attempt,
                    failure.cause,
                    str(failure),
                )
                num_deaths += failure.cause in ("lost", "timeout")
                if sink.is_committed or not failure.is_retriable or num_deaths >= MAX_DEATHS:
                    break
        assert last is not None, "max_attempts is at least 1"
        raise _as_request_error(last)

    async def _attempt(
        self, job: Job, prepared: Prepared, placement: Placement, sink: Sink
    ) -> bytes | None:
        """Run one attempt and give its place back in whatever way it ends."""
        try:
            result = await self._send(job, prepared, placement, sink)
        except ReplicaFailure as failure:
            placement.finish("failed" if failure.trips_breaker else "answered")
            raise
        except BaseException:
            placement.finish("abandoned")
            raise
        placement.finish("answered")
        return result

    async def _send(
        self, job: Job, prepared: Prepared, placement: Placement, sink: Sink
    ) -> bytes | None:
        replica = placement.replica
        streams = bool(job.head.stream) or replica.kind == "prefixfleet"
        expected_s = _EXPECTED_FACTOR * placement.winner.expected_s
        first_s = max(self._config.first_token_timeout_s, expected_s)
        limit_s = first_s if streams else self._config.response_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s) as limit,
                self._client.post(
                    f"{replica.url}/v1/{job.endpoint}",
                    _body(job, prepared, placement),
                    headers={"x-request-id": job.unique_id, **replica.headers},
                    replica=replica.id,
                ) as upstream,
            ):
                if not streams:
                    return await self._read_whole(job, placement, upstream)
                await Relay(
                    sink,
                    replica=replica.id,
                    limit=limit,
                    stall_s=self._config.stall_timeout_s,
                    on_output=lambda: self._note_output(job, placement),
                    on_chunk=lambda chunk: _note_usage(job, chunk),
                ).run(upstream)
                return None
        except TimeoutError:
            if sink.is_committed:
                raise ReplicaFailure("lost", f"{replica.id} stalled in mid-stream") from None
            raise ReplicaFailure("timeout", f"{replica.id} sent no token in time") from None

    async def _read_whole(self, job: Job, placement: Placement, upstream: Upstream) -> bytes:
        """Read an answer that is not streamed; its prefill is taken to last as long as expected."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(placement.winner.expected_s, placement.first_token)
        try:
            body = await upstream.read()
        finally:
            timer.cancel()
        self._note_output(job, placement)
        try:
            _note_usage(job, read_chunk(body))
        except msgspec.DecodeError as error:
            raise ReplicaFailure("lost", f"{placement.replica.id} sent no JSON: {error}") from None
        return body

    def _note_output(self, job: Job, placement: Placement) -> None:
        placement.first_token()
        if job.first_token_at is None:
            job.first_token_at = self._clock.monotonic()


def decision_headers(job: Job) -> dict[str, str]:
    """Describe the newest placement in the headers of the answer."""
    place = job.placed
    if place is None:
        return {}
    return {
        "x-prefixfleet-replica": place.winner.target.replica,
        "x-prefixfleet-policy": place.policy,
        "x-prefixfleet-mode": place.winner.mode,
        "x-prefixfleet-cached-tokens-predicted": str(place.winner.num_cached_tokens),
    }


def _body(job: Job, prepared: Prepared, placement: Placement) -> bytes:
    replica = placement.replica
    if replica.kind != "prefixfleet":
        return body_for_foreign(
            job.fields,
            job.endpoint,
            replica.kind,
            stream=bool(job.head.stream),
            cache_salt=job.cache_salt,
        )
    single = prepared.prompts[0] if len(prepared.prompts) == 1 else None
    extension = FleetExtension(
        request_id=job.unique_id,
        cache_salt=job.cache_salt,
        tenant=job.tenant.name,
        weight=job.tenant.weight,
        seed=job.seed,
        prompt_token_ids=single,
    )
    several = prepared.prompts if len(prepared.prompts) > 1 else None
    return body_for_ours(job.fields, extension, prompts=several)


def _note_usage(job: Job, chunk: Chunk) -> None:
    job.usage = chunk.realised or job.usage


class _ErrorObject(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: _ErrorObject


def _as_request_error(failure: ReplicaFailure) -> RequestError:
    """Say to the client what the last failure means for it.

    What the client did wrong is said in the replica's words. A replica that refuses the gateway
    (401, 403) or has no such model (404) is the operator's problem, and reads as a lost replica.
    """
    if failure.cause == "timeout":
        return RequestError("first_token_timeout", str(failure), retry_after_s=1.0)
    kind = _KIND_OF_STATUS.get(failure.status or 0)
    if kind is None:
        return RequestError("replica_lost", f"no replica could finish this request: {failure}")
    try:
        said = msgspec.json.decode(failure.body, type=_ErrorEnvelope).error
    except msgspec.DecodeError:
        said = _ErrorObject()
    if said.code == "context_length_exceeded":
        kind = "context_length_exceeded"
    return RequestError(
        kind,
        said.message or str(failure),
        param=said.param,
        retry_after_s=(failure.retry_after_s or 1.0) if kind == "overloaded" else None,
    )

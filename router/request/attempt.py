"""One attempt on one replica: sent, relayed under its time limits, its place given back.

Whether there is another attempt is dispatch's decision; which replica, the planner's.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from engine.frontend.extension import FleetExtension
from kvindex.foundation.clock import Clock
from kvindex.foundation.tracing import outgoing, span
from router.config import RouterConfig
from router.fleet.client import ReplicaClient, ReplicaFailure, Upstream
from router.request.body import body_for_foreign, body_for_ours
from router.request.chunks import read_chunk
from router.request.failure import as_drained
from router.request.job import Job
from router.request.placement import Placement
from router.request.prepare import Prepared
from router.request.relay import Relay
from router.request.sinks import Sink
from router.request.watch import SilenceWatch

_EXPECTED_FACTOR = 3.0


class AttemptRunner:
    """Runs attempts. A replica that leaves the fleet ends those that are silent, see `watch`."""

    def __init__(
        self, *, config: RouterConfig, client: ReplicaClient, clock: Clock, watch: SilenceWatch
    ) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._watch = watch

    async def run(
        self, job: Job, prepared: Prepared, placement: Placement, sink: Sink
    ) -> bytes | None:
        """Serve a job into `sink`; return the body of an answer that was no stream.

        Raises ReplicaFailure. The place is given back in whatever way the attempt ends.
        """
        try:
            with span("gateway.attempt", replica=placement.replica.id, attempt=placement.attempt):
                result = await self._send(job, prepared, placement, sink)
        except ReplicaFailure as caught:
            replica = placement.replica
            failure = as_drained(caught, replica=replica.id, draining=replica.report.draining)
            placement.finish("failed" if failure.trips_breaker else "answered")
            raise failure from None
        except BaseException:
            placement.finish("abandoned", num_output_tokens=job.transcript.num_tokens)
            raise
        placement.finish("answered", num_output_tokens=job.num_output_tokens)
        return result

    async def _send(
        self, job: Job, prepared: Prepared, placement: Placement, sink: Sink
    ) -> bytes | None:
        replica = placement.replica
        streams = bool(job.head.stream) or replica.kind == "prefixfleet"
        relay: Relay | None = None
        try:
            async with asyncio.timeout(self._limit_s(placement, streams=streams)) as limit:
                answer = await self._client.post(
                    f"{replica.url}/v1/{job.endpoint}",
                    _body(job, prepared, placement),
                    headers={
                        "x-request-id": job.unique_id,
                        **outgoing(),
                        **replica.headers_for(placement.winner.target),
                    },
                    replica=replica.id,
                )
                with answer:
                    if not streams:
                        return await self._read_whole(job, placement, answer)
                    relay = self._relay(job, placement, sink, limit)
                    with self._watch.watching(replica, limit, relay):
                        await relay.run(answer)
                    return None
        except TimeoutError:
            raise self._too_slow(placement, relay) from None

    def _limit_s(self, placement: Placement, *, streams: bool) -> float:
        """Bound the wait for the first token, or for a whole answer of a foreign engine."""
        if not streams:
            return self._config.response_timeout_s
        expected_s = _EXPECTED_FACTOR * placement.winner.expected_s
        return max(self._config.first_token_timeout_s, expected_s)

    def _relay(self, job: Job, placement: Placement, sink: Sink, limit: asyncio.Timeout) -> Relay:
        return Relay(
            sink,
            replica=placement.replica.id,
            limit=limit,
            stall_s=self._config.stall_timeout_s,
            on_output=lambda: self._note_output(job, placement),
            on_chunks=partial(job.took, execution=placement.replica.execution),
        )

    def _too_slow(self, placement: Placement, relay: Relay | None) -> ReplicaFailure:
        replica = placement.replica
        if self._watch.has_gone(replica):
            return ReplicaFailure("lost", f"{replica.id} fell silent and let its lease lapse")
        if relay is not None and relay.has_output:
            return ReplicaFailure("stalled", f"{replica.id} stalled in mid-stream")
        return ReplicaFailure("timeout", f"{replica.id} sent no token in time")

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
            job.usage = read_chunk(body).realised or job.usage
        except msgspec.DecodeError as error:
            raise ReplicaFailure(
                "gave_up", f"{placement.replica.id} sent no JSON: {error}"
            ) from None
        return body

    def _note_output(self, job: Job, placement: Placement) -> None:
        placement.first_token()
        if job.first_token_at is None:
            job.first_token_at = self._clock.monotonic()
            job.served = placement.place
            job.served_by_foreign = placement.replica.kind != "prefixfleet"


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
        priority=job.priority,
        seed=job.seed,
        prompt_token_ids=single,
        dp_rank=placement.winner.target.dp_rank,
        return_token_ids=True,
        resume=job.transcript.resume(),
    )
    several = prepared.prompts if len(prepared.prompts) > 1 else None
    return body_for_ours(
        job.fields,
        extension,
        prompts=several,
        stream=bool(job.head.stream),
        states_usage=job.head.states_usage,
    )

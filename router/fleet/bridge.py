"""Brings a stock vLLM into the fleet: follows its KV events into the index, speaks for it there.

One bridge per engine; of several processes that could, one does, by a claim. What an event means is
kvindex.foreign_stream's, how an index is kept true kvindex.ingest's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import reduce

from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foreign_inventory import ForeignInventory
from kvindex.foreign_stream import ForeignStream
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import DependencyError, PrefixFleetError
from kvindex.hashing import known_answer
from kvindex.index import LoadReport, PrefixIndex, Target
from kvindex.ingest import Ingester
from kvindex.ingest_source import IngestSource, Trust
from kvindex.registry import FleetRegistry, ReplicaRecord, ServedAdapter, pool_id
from kvindex.shared_record import SharedRecord
from kvindex.subscriber import EventSubscriber
from router.config import StaticReplica
from router.fleet.bridge_assignment import Assigner, Assignment
from router.fleet.client import ReplicaClient
from router.fleet.vllm_engine import VllmEngine

log = logging.getLogger("prefixfleet.router.bridge")

RENEW_S = 2.0
LEASE_S = 10.0


class EngineBridge:
    """Keeps one configured engine in index and registry; `run` until cancelled.

    `owner` names this process; what else is given is for the Assigner.
    """

    def __init__(
        self,
        config: StaticReplica,
        *,
        client: ReplicaClient,
        registry: FleetRegistry,
        open_index: Callable[[str], PrefixIndex],
        clock: Clock,
        owner: str,
        internal_headers: Mapping[str, str],
        on_bundle: Callable[[TokenizerBundle], None],
        renew_s: float = RENEW_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self.replica_id = config.id
        self.trust = Trust("FALLBACK", "its bridge has not started")
        self._config = config
        self._registry = registry
        self._open_index = open_index
        self._clock = clock
        self._owner = owner
        self._renew_s = renew_s
        self._lease_s = lease_s
        self._engine = VllmEngine(config.base_url, client=client, headers=config.headers)
        self._assigner = Assigner(
            config,
            engine=self._engine,
            client=client,
            registry=registry,
            clock=clock,
            internal_headers=internal_headers,
            on_bundle=on_bundle,
        )
        self._loads: dict[int, LoadReport] = {}
        self._healthy_at: float | None = None

    async def run(self) -> None:
        """Follow the engine while this process has the claim; try again whatever goes wrong."""
        claim = f"bridge/{self.replica_id}"
        assignment: Assignment | None = None
        try:
            while True:
                try:
                    if assignment is None or not await self._assigner.fits(assignment):
                        assignment = await self._assigner.assign()
                    if await self._registry.claim(claim, self._owner, lease_s=self._lease_s):
                        await self._follow(assignment, claim)
                        assignment = None
                    else:
                        self._note(Trust("FALLBACK", "another process bridges it"))
                except PrefixFleetError as error:
                    assignment = None
                    self._note(Trust("FALLBACK", str(error)))
                await asyncio.sleep(self._renew_s)
        finally:
            await self._give_back(claim)

    async def _give_back(self, claim: str) -> None:
        try:
            await self._registry.unclaim(claim, self._owner)
        except DependencyError as error:
            log.warning("replica=%s claim left to lapse: %s", self.replica_id, error)

    # Following

    async def _follow(self, assignment: Assignment, claim: str) -> None:
        """Follow every rank until the claim is lost, the pool is another, or an ingester fails."""
        pool = pool_id(assignment.facts.served_models[0], assignment.identity, assignment.scheme)
        index = self._open_index(pool)
        record = SharedRecord(self._registry)
        streams = [
            self._stream(assignment, rank) for rank in range(self._config.data_parallel_size)
        ]
        ingesters = [
            self._ingester(assignment, rank, stream, index, record)
            for rank, stream in enumerate(streams)
        ]
        await self._look_at_engine()
        running = [asyncio.create_task(ingester.run()) for ingester in ingesters]
        log.info(
            "bridging replica=%s events=%s pool=%s",
            self.replica_id,
            assignment.endpoints.events,
            pool,
        )
        try:
            num_checked = 0
            while not any(task.done() for task in running):
                await asyncio.wait(running, timeout=self._renew_s)
                await self._look_at_engine()
                self._note(reduce(Trust.at_most, [ingester.trust for ingester in ingesters]))
                if not await self._is_still_ours(assignment, claim):
                    return
                num_disconnects = sum(stream.counters.num_disconnects for stream in streams)
                if num_disconnects != num_checked:
                    # What is at the other end now may be another engine altogether.
                    if not await self._is_the_same(assignment):
                        return
                    num_checked = num_disconnects
        finally:
            for task in running:
                task.cancel()
            ends = await asyncio.gather(*running, return_exceptions=True)
            for stream in streams:
                await stream.close()
            await index.close()
        for end in ends:
            if isinstance(end, Exception):
                log.error("ingester of %s failed", self.replica_id, exc_info=end)

    async def _is_still_ours(self, assignment: Assignment, claim: str) -> bool:
        """Keep the claim; False when it is lost, or the pool to join has become another."""
        try:
            has_claim = await self._registry.claim(claim, self._owner, lease_s=self._lease_s)
            return has_claim and await self._assigner.fits(assignment)
        except DependencyError as error:
            log.warning("replica=%s claim not renewed: %s", self.replica_id, error)
            return True

    async def _is_the_same(self, assignment: Assignment) -> bool:
        """Ask again what the engine is; one that does not answer is given up."""
        try:
            return await self._assigner.assign() == assignment
        except PrefixFleetError as error:
            log.warning("replica=%s not followed for now: %s", self.replica_id, error)
            return False

    def _stream(self, assignment: Assignment, rank: int) -> ForeignStream:
        endpoints = assignment.endpoints.of_rank(rank)
        return ForeignStream(
            self.replica_id,
            subscriber=EventSubscriber(endpoints.events, replay_endpoint=endpoints.replay),
            inventory=ForeignInventory(assignment.scheme, adapters=assignment.facts.adapters),
            clock=self._clock,
            rank=rank if self._config.data_parallel_size > 1 else None,
        )

    def _ingester(
        self,
        assignment: Assignment,
        rank: int,
        stream: ForeignStream,
        index: PrefixIndex,
        record: SharedRecord,
    ) -> Ingester:
        limits = (
            Trust("EXACT") if assignment.trouble is None else Trust("DEGRADED", assignment.trouble)
        )
        source = IngestSource(
            snapshot=stream.snapshot,
            report=lambda: self._loads.get(rank, LoadReport()),
            is_alive=self._is_alive,
            make_record=lambda epoch: self._record(assignment, epoch),
            trust=lambda: stream.trust.at_most(limits),
            layout=lambda: stream.layout,
        )
        return Ingester(
            Target(self.replica_id, rank),
            subscriber=stream,
            index=index,
            registry=record.of_rank(rank),
            source=source,
            lease_s=self._lease_s,
            renew_s=self._renew_s,
        )

    async def _look_at_engine(self) -> None:
        """Ask how the engine does; one that does not answer loses its lease."""
        if not await self._engine.is_healthy():
            return
        self._healthy_at = self._clock.monotonic()
        try:
            self._loads = await self._engine.loads()
        except PrefixFleetError as error:
            log.warning("replica=%s no load: %s", self.replica_id, error)

    def _is_alive(self) -> bool:
        seen_at = self._healthy_at
        return seen_at is not None and self._clock.monotonic() - seen_at < self._lease_s / 2

    def _record(self, assignment: Assignment, epoch: int) -> ReplicaRecord:
        facts = assignment.facts
        return ReplicaRecord(
            id=self.replica_id,
            kind="vllm",
            url=self._engine.url,
            epoch=epoch,
            served_models=facts.served_models,
            identity=assignment.identity,
            hash_scheme=assignment.scheme,
            known_answer=known_answer(assignment.scheme),
            num_blocks=facts.num_blocks or 0,
            max_model_len=facts.max_model_len,
            dp_size=self._config.data_parallel_size,
            hit_granularity=facts.block_size,
            adapters=tuple(ServedAdapter(a.name, a.path) for a in facts.adapters.values()),
        )

    def _note(self, trust: Trust) -> None:
        if trust != self.trust:
            log.info(
                "replica=%s mode=%s reason=%s", self.replica_id, trust.mode, trust.reason or "-"
            )
        self.trust = trust

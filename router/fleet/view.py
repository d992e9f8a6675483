"""The fleet as this gateway sees it: registered and configured replicas, pools, refusals.

One task polls; requests only read. It never forgets a replica because a store went silent: while
Redis is down, or came back empty, the last known records go on serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import DependencyError
from kvindex.hashing import Adapter
from kvindex.index import TargetMatch, TargetState, TrustMode
from kvindex.registry import Registry, ReplicaRecord, ServedAdapter
from router.fleet.adapters import pinned_adapters, served_names
from router.fleet.index_access import IndexAccess
from router.fleet.pools import Pool, PoolBook, Refusal
from router.fleet.replica import Replica
from router.fleet.static import StaticProbe
from router.policy.types import TargetView

log = logging.getLogger("prefixfleet.router.fleet")

FORGET_S = 60.0
"""How long a replica that left the registry stays known as a last resort."""
REGISTRY_TIMEOUT_S = 2.0


class FleetView:
    """Replicas by id; what is derived from them holds until `version` changes.

    `on_refused` is told of each refusal once, `on_forgotten` of each replica that has left or was
    replaced by a new process.
    """

    def __init__(
        self,
        *,
        registry: Registry | None,
        index: IndexAccess | None,
        probes: Sequence[StaticProbe],
        clock: Clock,
        internal_token: str | None,
        on_refused: Callable[[Refusal], None],
        on_forgotten: Callable[[Sequence[str]], None],
    ) -> None:
        self._registry = registry
        self._index = index
        self._probes = probes
        self._clock = clock
        self._internal_token = internal_token
        self._on_refused = on_refused
        self._on_forgotten = on_forgotten
        self._book = PoolBook()
        self._registered: dict[str, Replica] = {}
        self._serving: dict[str, list[Replica]] = {}
        self._pools: dict[str, list[Pool]] = {}
        self._models: dict[str, int | None] | None = None
        self._last_known: dict[str, list[TargetView]] = {}
        self.version = 0
        self._adapters: dict[str, ServedAdapter] = {}
        self.refusals: list[Refusal] = []
        self.registry_down_reason: str | None = None

    @property
    def replicas(self) -> list[Replica]:
        """Every known replica.

        One that is configured and bridged is the registered one while its record lives.
        """
        configured = {probe.replica.id: probe.replica for probe in self._probes}
        registered = {
            replica.id: replica
            for replica in self._registered.values()
            if replica.live or replica.id not in configured
        }
        return list({**configured, **registered}.values())

    @property
    def pools(self) -> list[Pool]:
        """The pools of the known replicas."""
        found = {r.pool.id: r.pool for r in self._registered.values() if r.pool is not None}
        return list(found.values())

    @property
    def index_is_up(self) -> bool:
        """Whether the index can be asked; False without one."""
        return self._index is not None and self._index.is_up

    @property
    def store_down_reason(self) -> str | None:
        """Why the shared stores do not answer, None while they do or where there are none."""
        index_reason = self._index.down_reason if self._index is not None else None
        return index_reason or self.registry_down_reason

    @property
    def mode(self) -> TrustMode:
        """The worst mode of any live replica; FALLBACK while the index is away."""
        modes = {self.mode_of(replica) for replica in self.replicas if replica.live}
        if modes == {"EXACT"}:
            return "EXACT"
        return "DEGRADED" if modes and "FALLBACK" not in modes else "FALLBACK"

    def mode_of(self, replica: Replica) -> TrustMode:
        """Return how far this gateway can trust what it knows of a replica's cache now."""
        return replica.report.mode if replica.pool is not None and self.index_is_up else "FALLBACK"

    def has_left(self, replica: Replica) -> bool:
        """Say whether a registered replica has let its lease lapse or was replaced since."""
        if replica.record is None:
            return False
        now = self._registered.get(replica.id)
        return now is None or not now.live or self.was_replaced(replica)

    def was_replaced(self, replica: Replica) -> bool:
        """Say whether another process has taken the place of a registered replica since."""
        if replica.record is None:
            return False
        now = self._registered.get(replica.id)
        if now is None or now.record is None:
            return False
        return now.record.epoch != replica.record.epoch

    def serving(self, model: str) -> list[Replica]:
        """Return the replicas that serve a model, live or not."""
        known = self._serving.get(model)
        if known is None:
            known = [replica for replica in self.replicas if model in replica.served_models]
            if known:  # Names that clients invent are not remembered.
                self._serving[model] = known
        return known

    def serving_as(self, model: str, replica_id: str) -> Replica:
        """Return the replica of that id among those that serve a model; KeyError without one."""
        for replica in self.serving(model):
            if replica.id == replica_id:
                return replica
        raise KeyError(replica_id)

    def pools_of(self, model: str) -> list[Pool]:
        """Return the pools that serve a model, nearly always one."""
        known = self._pools.get(model)
        if known is None:
            serving = self.serving(model)
            found = {r.pool.id: r.pool for r in serving if r.pool is not None}
            known = [found[pool_id] for pool_id in sorted(found)]
            if serving:  # Names that clients invent are not remembered.
                self._pools[model] = known
        return known

    def adapter(self, model: str) -> Adapter | None:
        """Return the adapter that a model name stands for, as block hashes see it."""
        found = self._adapters.get(model)
        return None if found is None else Adapter(found.name, found.path)

    def models(self) -> dict[str, int | None]:
        """Map every served model to the longest context of its replicas, None when unknown."""
        if self._models is not None:
            return self._models
        found: dict[str, int | None] = {}
        for replica in self.replicas:
            for model in replica.served_models:
                lengths = [n for n in (found.get(model), replica.max_model_len) if n is not None]
                found[model] = max(lengths) if lengths else None
        self._models = found
        return found

    def views(self, model: str, matches: Sequence[TargetMatch] | None) -> list[TargetView]:
        """Describe every target of a model to the planner; `matches` None: the index is away."""
        if matches is not None:
            by_target = {match.target: match for match in matches}
            return [
                replica.view(target, by_target.get(target), index_is_up=True)
                for replica in self.serving(model)
                for target in replica.targets
            ]
        known = self._last_known.get(model)
        if known is None:
            known = self._last_known[model] = [
                replica.view(target, None, index_is_up=False)
                for replica in self.serving(model)
                for target in replica.targets
            ]
        return known

    async def refresh(self) -> None:
        """Poll registry and index once; probing configured replicas is `refresh_static`'s."""
        if self._registry is not None:
            await self._refresh_registry(self._registry)
        if self._index is not None:
            # After the registry: a pool counts reservations only of gateways it has heard of.
            await self._index.probe([pool.id for pool in self.pools])
        await self._refresh_states()

    async def refresh_static(self) -> None:
        """Probe every configured replica once, all at the same time."""
        await asyncio.gather(*(self._probe(probe) for probe in self._probes))

    async def _probe(self, probe: StaticProbe) -> None:
        await probe.refresh(self._clock.monotonic())
        self._forget_derived()

    def _forget_derived(self) -> None:
        """Work out anew who serves what: to be called after every change of a replica."""
        self._serving.clear()
        self._pools.clear()
        self._last_known.clear()
        self._models = None
        self.version += 1

    async def _refresh_registry(self, registry: Registry) -> None:
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                records = await registry.records()
        except (DependencyError, TimeoutError) as error:
            reason = str(error) or f"no answer within {REGISTRY_TIMEOUT_S:g} s"
            if self.registry_down_reason is None:
                log.warning("registry unreachable, keeping the last records reason=%r", reason)
            self.registry_down_reason = reason
            return
        self.registry_down_reason = None
        self._take(records)

    def _take(self, records: Sequence[ReplicaRecord]) -> None:
        now = self._clock.monotonic()
        admitted, refused = self._book.admit(records, now)
        self._note_refusals(refused)
        for record, pool in admitted:
            self._admit(record, pool, now)
        listed = {record.id for record, _ in admitted}
        refused_ids = {refusal.replica for refusal in refused}
        gone: list[str] = []
        for replica in self._registered.values():
            if replica.id in listed:
                continue
            if replica.live:
                log.warning("replica left the registry replica=%s", replica.id)
            replica.live = False
            if replica.id in refused_ids or now - replica.seen_at > FORGET_S:
                gone.append(replica.id)
        for replica_id in gone:
            del self._registered[replica_id]
        if gone:
            self._on_forgotten(gone)
        self._name_adapters()
        self._forget_derived()

    def _name_adapters(self) -> None:
        """Settle what the names of adapters stand for, and who serves them."""
        records = {r.id: r.record for r in self._registered.values() if r.record is not None}
        pins = self._adapters = pinned_adapters(records.values())
        for replica_id, record in records.items():
            replica, names = self._registered[replica_id], served_names(record, pins)
            if names != replica.served_models:
                refused = [one.name for one in record.adapters if one.name not in names]
                log.info(
                    "replica serves replica=%s names=%s adapters_of_other_meaning=%s",
                    replica_id,
                    ",".join(names),
                    ",".join(refused) or "-",
                )
                replica.served_models = names

    def _admit(self, record: ReplicaRecord, pool: Pool, now: float) -> None:
        known = self._registered.get(record.id)
        num_restarts = known.num_restarts if known is not None else 0
        if known is not None and known.record is not None and known.record.epoch != record.epoch:
            self._on_forgotten([record.id])  # A restarted replica owes nothing for the old one.
            num_restarts += 1
        if known is None or known.record != record:
            log.info(
                "replica joined replica=%s epoch=%d url=%s models=%s pool=%s",
                record.id,
                record.epoch,
                record.url,
                ",".join(record.served_models),
                pool.id,
            )
            known = self._registered[record.id] = Replica(
                id=record.id,
                kind=record.kind,
                url=record.url.rstrip("/"),
                served_models=record.served_models,
                max_model_len=record.max_model_len or None,
                record=record,
                pool=pool,
                token=self._token_for(record),
                num_restarts=num_restarts,
            )
        known.live = True
        known.seen_at = now

    def _token_for(self, record: ReplicaRecord) -> str | None:
        """Return what a replica wants; the fleet's token never leaves it for a foreign engine."""
        if record.kind == "prefixfleet":
            return self._internal_token
        configured = (probe.replica for probe in self._probes)
        return next((r.token for r in configured if r.id == record.id), None)

    def _note_refusals(self, refused: list[Refusal]) -> None:
        for refusal in refused:
            if refusal not in self.refusals:
                log.error("replica refused replica=%s reason=%r", refusal.replica, refusal.reason)
                self._on_refused(refusal)
        self.refusals = refused

    async def _refresh_states(self) -> None:
        if self._index is None:
            return
        for pool in self.pools:
            states = await self._index.states(pool.id)
            for state in states or ():
                self._take_state(state)
        self._forget_derived()

    def _take_state(self, state: TargetState) -> None:
        replica = self._registered.get(state.target.replica)
        if replica is not None:
            replica.rank_reports[state.target.dp_rank] = state.report
            replica.rank_blocks[state.target.dp_rank] = state.num_blocks

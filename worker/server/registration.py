"""Puts a ready replica into the fleet: registry record, leases and KV events into the index.

The work is kvindex.ingest's, one ingester per engine core; here it is told what this replica is
and how its cores do. A replica on its own (no index URL) registers nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator

from engine.messages import PoolSnapshot
from kvindex.index import IndexOp, LoadReport, Target, Tier
from kvindex.ingest import Ingester
from kvindex.ingest_source import IngestSource
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ModelIdentity, Registry, ReplicaRecord, pool_id
from kvindex.shared_record import SharedRecord
from kvindex.snapshot import SnapshotData
from kvindex.subscriber import EventSubscriber
from worker.core.client import EngineClient
from worker.server.front import ReplicaFront

_log = logging.getLogger("prefixfleet.replica.registration")

_RESTART_DELAY_S = 1.0
_DEATH_POLL_S = 0.1


@contextlib.asynccontextmanager
async def registered(front: ReplicaFront, client: EngineClient) -> AsyncIterator[None]:
    """Keep the replica registered inside the block; deregister it at the end.

    An index that cannot be reached is no reason not to serve: registration goes on trying.
    Raises ConfigError for an index URL that cannot be used.
    """
    spec = front.spec
    if spec.index_url is None or spec.fleet_secret is None:
        yield
        return
    pool = pool_id(spec.served_models[0], model_identity(front), spec.engine.hash_scheme)
    index = RedisIndex(connect(spec.index_url, spec.redis), pool)
    registry = RedisRegistry(connect(spec.index_url, spec.redis), spec.fleet_secret.encode())
    record = SharedRecord(registry)
    tasks = [
        asyncio.create_task(
            _follow(front, client, rank, index, record.of_rank(rank)), name=f"ingest-{rank}"
        )
        for rank in range(len(client.ranks))
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await index.close()
        await registry.close()


async def _follow(
    front: ReplicaFront, client: EngineClient, dp_rank: int, index: RedisIndex, registry: Registry
) -> None:
    """Keep one rank in the index until cancelled.

    An ingester that fails is replaced, and a snapshot repairs all; a core that dies is taken out,
    and the one that replaces it starts with an empty cache.
    """
    while True:
        core = client.ranks[dp_rank]
        if core.dead_reason is None:
            try:
                await _follow_core(front, core, dp_rank, index, registry)
            except Exception:  # noqa: BLE001  (the border of the ingest task)
                _log.exception("ingester failed, a new one follows rank=%d", dp_rank)
        await asyncio.sleep(_RESTART_DELAY_S)


async def _follow_core(
    front: ReplicaFront, core: EngineClient, dp_rank: int, index: RedisIndex, registry: Registry
) -> None:
    """Follow one core until it dies; then it is out of the index."""
    info, spec = core.info, front.spec
    assert info.events is not None, "an engine of a fleet publishes events"
    subscriber = EventSubscriber(info.events.endpoint, replay_endpoint=info.events.replay_endpoint)
    ingester = Ingester(
        Target(spec.replica_id, dp_rank),
        subscriber=subscriber,
        index=index,
        registry=registry,
        source=ingest_source(front, core),
        lease_s=spec.lease_s,
        renew_s=spec.renew_s,
    )
    front.ingesters[dp_rank] = ingester
    running = asyncio.create_task(ingester.run(), name=f"ingester-{dp_rank}")
    try:
        while core.dead_reason is None and not running.done():
            await asyncio.wait({running}, timeout=_DEATH_POLL_S)
    finally:
        running.cancel()
        (end,) = await asyncio.gather(running, return_exceptions=True)
        subscriber.close()
        del front.ingesters[dp_rank]
    if isinstance(end, Exception):
        raise end


def model_identity(front: ReplicaFront) -> ModelIdentity:
    """Say which model this is: equal for replicas that give the same tokens for the same text."""
    return ModelIdentity(
        model=front.spec.model_name or front.spec.served_models[0],
        tokenizer_digest=front.bundle.tokenizer_digest,
        template_digest=front.bundle.template_digest,
    )


def ingest_source(front: ReplicaFront, core: EngineClient) -> IngestSource:
    """Tell the ingester how to ask an engine core."""

    async def snapshot() -> SnapshotData:
        (snapshot,) = await core.snapshots()
        return snapshot_data(snapshot)

    return IngestSource(
        snapshot=snapshot,
        report=lambda: load_report(front, core),
        # Half a lease: a core that hangs loses its entries within one and a half.
        is_alive=lambda: front.is_heard(core, within_s=front.spec.lease_s / 2),
        make_record=lambda epoch: replica_record(front, core, epoch),
        layout=lambda: core.info.cache_layout,
    )


def snapshot_data(snapshot: PoolSnapshot) -> SnapshotData:
    """Group the blocks of a snapshot into one operation per group and tier."""
    hashes: dict[tuple[int, Tier], list[bytes]] = defaultdict(list)
    for entry in snapshot.entries:
        tier: Tier = "host" if entry.tier == "host" else "gpu"
        hashes[entry.group, tier].append(entry.block_hash)
    ops = [
        IndexOp(kind="stored", hashes=tuple(blocks), group=group, tier=tier)
        for (group, tier), blocks in hashes.items()
    ]
    return SnapshotData(boot_ns=snapshot.boot_ns, seq=snapshot.seq, ops=ops)


def load_report(front: ReplicaFront, core: EngineClient) -> LoadReport:
    """Say how an engine core does; mode and reason are the ingester's to fill in."""
    stats = core.stats
    return LoadReport(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        kv_usage=1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
        draining=front.status == "draining" or front.rest_reason is not None,
    )


def replica_record(front: ReplicaFront, core: EngineClient, epoch: int) -> ReplicaRecord:
    """Describe this replica for the registry; all its cores are alike."""
    info, spec = core.info, front.spec
    return ReplicaRecord(
        id=spec.replica_id,
        kind="prefixfleet",
        url=front.url,
        epoch=epoch,
        served_models=spec.served_models,
        identity=model_identity(front),
        hash_scheme=spec.engine.hash_scheme,
        known_answer=info.known_answer,
        execution_digest=info.execution_digest,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        dp_size=spec.data_parallel_size,
        adapters=front.adapters.records(),
    )

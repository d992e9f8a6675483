"""Puts a ready replica into the fleet: registry record, lease and KV events into the index.

The work is kvindex.ingest's; here it is told what this replica is and how its engine does. A
replica on its own (no index URL) registers nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator

from engine.messages import PoolSnapshot
from kvindex.index import IndexOp, LoadReport, Target, Tier
from kvindex.ingest import Ingester, IngestSource
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ModelIdentity, ReplicaRecord, pool_id
from kvindex.snapshot import SnapshotData
from kvindex.subscriber import EventSubscriber
from worker.core.client import EngineClient
from worker.server.front import ReplicaFront

_log = logging.getLogger("prefixfleet.replica.registration")

_RESTART_DELAY_S = 1.0


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
    task = asyncio.create_task(_follow(front, client, index, registry), name="ingest")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await index.close()
        await registry.close()


async def _follow(
    front: ReplicaFront, client: EngineClient, index: RedisIndex, registry: RedisRegistry
) -> None:
    """Run the ingester until cancelled; one that fails is replaced, and a snapshot repairs all."""
    info, spec = client.info, front.spec
    assert info.events_endpoint is not None, "an engine of a fleet publishes events"
    while True:
        subscriber = EventSubscriber(info.events_endpoint, replay_endpoint=info.replay_endpoint)
        ingester = Ingester(
            Target(spec.replica_id),
            subscriber=subscriber,
            index=index,
            registry=registry,
            source=ingest_source(front, client),
            lease_s=spec.lease_s,
            renew_s=spec.renew_s,
        )
        front.ingester = ingester
        try:
            await ingester.run()
        except Exception:  # noqa: BLE001  (the border of the ingest task)
            _log.exception("ingester failed, a new one follows")
        finally:
            subscriber.close()
        await asyncio.sleep(_RESTART_DELAY_S)


def model_identity(front: ReplicaFront) -> ModelIdentity:
    """Say which model this is: equal for replicas that give the same tokens for the same text."""
    return ModelIdentity(
        model=front.spec.model_name or front.spec.served_models[0],
        tokenizer_digest=front.bundle.tokenizer_digest,
        template_digest=front.bundle.template_digest,
    )


def ingest_source(front: ReplicaFront, client: EngineClient) -> IngestSource:
    """Tell the ingester how to ask this replica's engine."""

    async def snapshot() -> SnapshotData:
        return snapshot_data(await client.snapshot())

    return IngestSource(
        snapshot=snapshot,
        report=lambda: load_report(front, client),
        # Half a lease: a core that hangs loses its entries within one and a half.
        is_alive=lambda: front.is_heard(client, within_s=front.spec.lease_s / 2),
        make_record=lambda epoch: replica_record(front, client, epoch),
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


def load_report(front: ReplicaFront, client: EngineClient) -> LoadReport:
    """Say how the engine does; mode and reason are the ingester's to fill in."""
    stats = client.stats
    return LoadReport(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        kv_usage=1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
        draining=front.status == "draining",
    )


def replica_record(front: ReplicaFront, client: EngineClient, epoch: int) -> ReplicaRecord:
    """Describe this replica for the registry."""
    info, spec = client.info, front.spec
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
    )

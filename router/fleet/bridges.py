"""The bridges of one gateway process: one task for each configured engine that publishes events.

Any number of gateways may run them; the claim in the registry decides which one follows an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.clock import Clock
from kvindex.index import PrefixIndex
from kvindex.registry import FleetRegistry
from router.config import StaticReplica
from router.fleet.bridge import EngineBridge
from router.fleet.client import ReplicaClient

log = logging.getLogger("prefixfleet.router.bridge")

_RESTART_DELAY_S = 1.0


class Bridges:
    """Owns the tasks; `start` inside a running loop, `close` ends them and leaves the fleet."""

    def __init__(
        self,
        replicas: Sequence[StaticReplica],
        *,
        client: ReplicaClient,
        registry: FleetRegistry,
        open_index: Callable[[str], PrefixIndex],
        clock: Clock,
        owner: str,
        internal_headers: Mapping[str, str],
        on_bundle: Callable[[TokenizerBundle], None],
    ) -> None:
        self._bridges = [
            EngineBridge(
                replica,
                client=client,
                registry=registry,
                open_index=open_index,
                clock=clock,
                owner=owner,
                internal_headers=internal_headers,
                on_bundle=on_bundle,
            )
            for replica in replicas
            if replica.events is not None
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def reason_for(self, replica_id: str) -> str:
        """Say why a configured engine is not followed as it should be, "" when it is."""
        found = (bridge.trust.reason for bridge in self._bridges if bridge.replica_id == replica_id)
        return next(found, "")

    def start(self) -> None:
        """Begin to follow every engine."""
        self._tasks = [asyncio.create_task(_keep_running(bridge)) for bridge in self._bridges]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _keep_running(bridge: EngineBridge) -> None:
    while True:
        try:
            await bridge.run()
        except Exception:
            # The border of a task that must outlive whatever one engine says.
            log.exception("bridge failed, trying again")
        await asyncio.sleep(_RESTART_DELAY_S)

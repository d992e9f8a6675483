"""Everything one gateway consists of, put together once and handed to its handlers.

It connects parts and owns their start and end; it decides nothing, and it knows neither listeners
nor signals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme
from kvindex.index import PrefixIndex
from kvindex.registry import Registry
from router.config import GatewaySpec, RouterConfig
from router.fleet.client import ReplicaClient
from router.fleet.index_access import IndexAccess
from router.fleet.pools import Refusal
from router.fleet.static import StaticProbe
from router.fleet.tokenizers import Source, TokenizerStore
from router.fleet.view import FleetView
from router.observe.decisions import DecisionLog
from router.observe.metrics import GatewayMetrics
from router.policy.planner import Planner, PlannerConfig
from router.request.admit import Admission
from router.request.background import Background
from router.request.dispatch import Dispatcher
from router.request.placement import Placer
from router.request.prepare import Preparer
from router.request.settle import Settler
from router.tenancy.tenants import TenantDirectory, build_policies

log = logging.getLogger("prefixfleet.router")

_RELEASE_TIMEOUT_S = 5.0


class Stores(msgspec.Struct, frozen=True):
    """The shared stores, as Protocols: Redis in a process, memory in a test."""

    registry: Registry
    open_index: Callable[[str], PrefixIndex]


class Tokenizing(msgspec.Struct, frozen=True):
    """How requests for a model become tokens; `encoder` None while no replica has given one."""

    encoder: PromptEncoder | None
    scheme: HashScheme
    max_model_len: int | None


class Gateway:
    """The parts of one gateway. Make it, `start` it inside a running loop, `close` it."""

    def __init__(self, spec: GatewaySpec, *, id: str, clock: Clock, stores: Stores | None) -> None:
        """Put the parts together; raise ConfigError for tenants or policies that make no sense."""
        config = spec.router
        self.id = id
        self.config = config
        self.clock = clock
        self.admin_key = spec.admin_key
        self.fleet_secret = spec.fleet_secret.encode()
        self.started_at = int(clock.now())
        _check_static_replicas(config)
        self.directory = TenantDirectory(spec.tenants)
        self.metrics = GatewayMetrics()
        self.decisions = DecisionLog(max_records=config.max_decisions)
        self.admission = Admission(max_in_flight=config.max_in_flight)
        self.client = ReplicaClient(connect_timeout_s=config.connect_timeout_s)
        self.planner = Planner(
            build_policies(self.directory.tenants, config),
            config=PlannerConfig(max_queue_s=config.first_token_timeout_s),
            gateway=id,
        )
        self.settler = Settler(metrics=self.metrics, decisions=self.decisions, clock=clock)
        self._background = Background()
        self._pollers: list[asyncio.Task[None]] = []
        self._stores = stores
        self.index = self._build_index(stores) if stores is not None else None
        self.view = FleetView(
            registry=stores.registry if stores is not None else None,
            index=self.index,
            probes=[StaticProbe(replica, self.client) for replica in config.replicas],
            clock=clock,
            internal_token=spec.internal_token,
            on_refused=self._count_refusal,
            on_forgotten=self.planner.forget,
        )
        self._build_request_path(spec)

    def _build_index(self, stores: Stores) -> IndexAccess:
        return IndexAccess(
            stores.open_index,
            gateway=self.id,
            timeout_s=self.config.index_timeout_s,
            lease_s=self.config.gateway_lease_s,
            on_latency=self.metrics.observe_index_call,
        )

    def _build_request_path(self, spec: GatewaySpec) -> None:
        config = self.config
        self._executor = ThreadPoolExecutor(config.num_encoder_threads, "encode")
        self.preparer = Preparer(self._executor, num_threads=config.num_encoder_threads)
        self._tokenizers = TokenizerStore(
            self.client,
            clock=self.clock,
            executor=self._executor,
            cache_dir=Path(spec.cache_dir) if spec.cache_dir else None,
        )
        placer = Placer(
            view=self.view,
            index=self.index,
            planner=self.planner,
            background=self._background,
            clock=self.clock,
            gateway=self.id,
        )
        self.dispatcher = Dispatcher(
            config=config,
            placer=placer,
            client=self.client,
            clock=self.clock,
            on_retry=lambda replica, cause: self.metrics.retries.labels(replica, cause).inc(),
        )

    async def start(self) -> None:
        """Look at the fleet once, then keep looking; a store that is down does not stop it."""
        await self.client.start()
        await asyncio.gather(self.view.refresh(), self.view.refresh_static())
        for poll in (self._refresh, self.view.refresh_static):
            self._pollers.append(asyncio.create_task(self._every_poll(poll)))

    async def close(self) -> None:
        """Stop polling, deliver what is still to be released, close every connection."""
        for poller in self._pollers:
            poller.cancel()
        await asyncio.gather(*self._pollers, return_exceptions=True)
        await self._background.drain(timeout_s=_RELEASE_TIMEOUT_S)
        await self.client.close()
        if self.index is not None:
            await self.index.close()
        if self._stores is not None:
            await self._stores.registry.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def can_serve(self, model: str, *, isolated: bool) -> bool:
        """Whether some replica of a model may serve an isolated tenant, if it is one."""
        serving = self.view.serving(model)
        return any(replica.kind != "openai" or not isolated for replica in serving)

    async def tokenizer(self, model: str) -> Tokenizing | None:
        """Return how requests for a model are tokenized, None when only stock engines serve it."""
        replicas = [r for r in self.view.serving(model) if r.pool is not None]
        pool = next((r.pool for r in replicas if r.pool is not None), None)
        if pool is None:
            return None
        lengths = [r.max_model_len for r in replicas if r.max_model_len is not None]
        longest = max(lengths) if lengths else None
        # Live ones first: a dead one would cost a connect time-out.
        sources = [
            Source(r.id, r.url, r.headers) for r in sorted(replicas, key=lambda r: not r.live)
        ]
        encoder = await self._tokenizers.get(pool, sources, max_model_len=longest)
        return Tokenizing(encoder, pool.scheme, longest)

    async def _refresh(self) -> None:
        await self.view.refresh()
        for model in self.view.models():
            await self.tokenizer(model)

    async def _every_poll(self, poll: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self.config.poll_s)
            try:
                await poll()
            except Exception:
                # The border of a task that must outlive whatever one look at the fleet meets.
                log.exception("polling failed")

    def _count_refusal(self, refusal: Refusal) -> None:
        self.metrics.refused.labels(refusal.replica).inc()


def _check_static_replicas(config: RouterConfig) -> None:
    seen: set[str] = set()
    for replica in config.replicas:
        if replica.id in seen:
            raise ConfigError(
                f"router.replicas: two replicas are called {replica.id!r}; give one a `name`"
            )
        seen.add(replica.id)

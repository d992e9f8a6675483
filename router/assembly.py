"""Everything one gateway consists of, put together once and handed to its handlers.

It connects parts and owns their start and end; it decides nothing, and it knows neither listeners
nor signals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import Clock
from kvindex.hashing import HashScheme
from kvindex.index import PrefixIndex
from kvindex.registry import FleetRegistry
from router.config import GatewaySpec, RecordConfig
from router.fleet.bridges import Bridges
from router.fleet.client import ReplicaClient
from router.fleet.history import OwnHistory
from router.fleet.index_access import IndexAccess
from router.fleet.pools import Refusal
from router.fleet.replica import Replica
from router.fleet.static import StaticProbe
from router.fleet.tokenizers import Source, TokenizerStore
from router.fleet.view import FleetView
from router.observe.decisions import DecisionLog
from router.observe.metrics import GatewayMetrics
from router.observe.prefix_tally import PrefixTally
from router.observe.recorder import Recorder
from router.observe.shared_decisions import FLUSH_S, SharedDecisions
from router.policy.planner import Planner, PlannerConfig
from router.policy.retry_budget import RetryBudget
from router.request.admit import Admission
from router.request.attempt import AttemptRunner
from router.request.background import Background
from router.request.dispatch import Dispatcher
from router.request.placement import Placer
from router.request.prepare import Preparer
from router.request.settle import Settler
from router.request.turns import Turns
from router.request.watch import SilenceWatch
from router.seat import Seat, siblings_of
from router.tenancy.administration import Administration
from router.tenancy.dry_run import PolicyDryRun
from router.tenancy.exchange import Exchange
from router.tenancy.live_directory import LiveDirectory
from router.tenancy.policies import PolicyChoice, TenantPolicies
from router.tenancy.reload import ConfigReload
from router.tenancy.stores import TenancyStores, memory_stores
from router.tenancy.tenancy import Tenancy
from router.tenancy.tenants import TenantDirectory
from router.tenancy.usage_files import UsageFiles

log = logging.getLogger("prefixfleet.router")

_RELEASE_TIMEOUT_S = 5.0


class Stores(msgspec.Struct, frozen=True):
    """The shared stores, as Protocols: Redis in a process, memory in a test."""

    registry: FleetRegistry
    open_index: Callable[[str], PrefixIndex]


class Tokenizing(msgspec.Struct, frozen=True):
    """How requests for a model become tokens; `encoder` None while no replica has given one.

    `is_foreign`: stock engines alone serve it, so they decide what a request may contain.
    """

    encoder: PromptEncoder | None
    scheme: HashScheme
    max_model_len: int | None
    is_foreign: bool


class Gateway:
    """The parts of one gateway. Make it, `start` it inside a running loop, `close` it."""

    def __init__(
        self,
        spec: GatewaySpec,
        *,
        id: str,
        clock: Clock,
        stores: Stores | None,
        tenancy_stores: TenancyStores | None = None,
        shared_decisions: SharedDecisions | None = None,
        seat: Seat | None = None,
    ) -> None:
        """Put the parts together; raise ConfigError for tenants or policies that make no sense.

        Without `tenancy_stores`, limits and usage are this gateway's own, and without
        `shared_decisions` its decisions. `seat`: this process has its listeners from a parent.
        """
        config = spec.router
        self.id = id
        self.config = config
        self.clock = clock
        self.admin_key = spec.admin_key
        self.fleet_secret = spec.fleet_secret.encode()
        self.started_at = int(clock.now())
        self.metrics = GatewayMetrics()
        self.decisions = DecisionLog(max_records=config.max_decisions, shared=shared_decisions)
        self.seat = seat
        self.siblings = siblings_of(seat, admin_key=spec.admin_key)
        self.dry_run = PolicyDryRun()
        self.admission = Admission(max_in_flight=config.max_in_flight)
        self.client = ReplicaClient(connect_timeout_s=config.connect_timeout_s)
        self.planner = Planner(
            {},
            config=PlannerConfig(
                max_queue_s=config.first_token_timeout_s,
                saturation_s=config.saturation_s,
                max_siblings=config.max_siblings,
                queue=config.queue,
                replication=config.hot_prefixes,
            ),
            gateway=id,
        )
        self.background = Background()
        self._budget = RetryBudget(share=config.retry_share, burst=config.retry_burst)
        self._build_tenancy(spec, tenancy_stores or memory_stores(gateway=id, clock=clock))
        self.history = OwnHistory()
        self.recorder = _recorder(config.record, clock, seat)
        files = config.usage_files
        self._usage_files = UsageFiles(files, owner=id) if files is not None else None
        self.prefixes = PrefixTally()
        self._known_live: set[str] = set()
        self.settler = Settler(
            metrics=self.metrics,
            decisions=self.decisions,
            clock=clock,
            gateway=id,
            tenancy=self.tenancy,
            recorder=self.recorder,
            usage_files=self._usage_files,
            prefixes=self.prefixes,
        )
        self._pollers: list[asyncio.Task[None]] = []
        self._tokenizing: dict[str, tuple[int, Tokenizing | None]] = {}
        self._stores = stores
        self.index = self._build_index(stores) if stores is not None else None
        self.view = FleetView(
            registry=stores.registry if stores is not None else None,
            index=self.index,
            probes=[StaticProbe(replica, self.client) for replica in config.replicas],
            clock=clock,
            internal_token=spec.internal_token,
            on_refused=self._count_refusal,
            on_forgotten=self._forget_replicas,
        )
        self._build_request_path(spec)
        self._bridges = self._build_bridges(stores, spec) if stores is not None else None

    @property
    def default_policy(self) -> PolicyChoice:
        """The policy of tenants that name none."""
        return self._policies.default

    @property
    def directory(self) -> TenantDirectory:
        """The tenants and keys of this moment."""
        return self.tenancy.directory

    def _build_tenancy(self, spec: GatewaySpec, stores: TenancyStores) -> None:
        config, clock = self.config, self.clock
        policies = self._policies = TenantPolicies(
            self.planner, (config.default_policy, config.default_policy_params)
        )
        live = LiveDirectory(
            spec.tenants,
            store=stores.store,
            snapshot_file=Path(spec.cache_dir) / "tenants.json" if spec.cache_dir else None,
            check=policies.check,
            on_change=policies.use,
        )
        self.tenancy = Tenancy(
            live,
            stores=stores,
            clock=clock,
            lease_s=config.gateway_lease_s,
            exchange=Exchange(self.planner, self._budget),
            spawn=self.background.start,
        )
        self.reload = ConfigReload(
            spec.source,
            running=config,
            live=live,
            policies=policies,
            metrics=self.metrics,
            clock=clock,
        )
        declared_in = spec.source.file if spec.source is not None else None
        self.administration = Administration(
            live, clock=clock, declared_in=declared_in or "the configuration"
        )

    def _build_index(self, stores: Stores) -> IndexAccess:
        return IndexAccess(
            stores.open_index,
            gateway=self.id,
            timeout_s=self.config.index_timeout_s,
            lease_s=self.config.gateway_lease_s,
            on_latency=self.metrics.observe_index_call,
            spawn=self.background.start,
        )

    def _build_bridges(self, stores: Stores, spec: GatewaySpec) -> Bridges:
        token = spec.internal_token
        return Bridges(
            spec.router.replicas,
            client=self.client,
            registry=stores.registry,
            open_index=stores.open_index,
            clock=self.clock,
            owner=self.id,
            internal_headers={"authorization": f"Bearer {token}"} if token else {},
            on_bundle=self._tokenizers.offer,
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
        self.turns = Turns(self.planner, clock=self.clock)
        self.placer = Placer(
            view=self.view,
            index=self.index,
            planner=self.planner,
            turns=self.turns,
            history=self.history,
            clock=self.clock,
            gateway=self.id,
        )
        self.watch = SilenceWatch(self.view.has_left, grace_s=config.lapse_grace_s)
        runner = AttemptRunner(
            config=config, client=self.client, clock=self.clock, watch=self.watch
        )
        self.dispatcher = Dispatcher(
            config=config,
            placer=self.placer,
            runner=runner,
            budget=self._budget,
            clock=self.clock,
            metrics=self.metrics,
        )

    async def start(self) -> None:
        """Look at the fleet once, then keep looking; a store that is down does not stop it."""
        await asyncio.gather(self.view.refresh(), self.view.refresh_static(), self.tenancy.start())
        await self.reload.at_start()
        for poll in (
            self._refresh,
            self.view.refresh_static,
            self.tenancy.poll,
            self.reload.follow,
        ):
            self._pollers.append(asyncio.create_task(self._every(self.config.poll_s, poll)))
        self._pollers.append(asyncio.create_task(self._every(FLUSH_S, self.decisions.flush)))
        if self._bridges is not None:
            self._bridges.start()

    async def close(self) -> None:
        """Stop polling, deliver what is still to be released, close every connection."""
        for poller in self._pollers:
            poller.cancel()
        await asyncio.gather(*self._pollers, return_exceptions=True)
        if self._bridges is not None:
            await self._bridges.close()
        self.watch.close()
        self.turns.close()
        await self.background.drain(timeout_s=_RELEASE_TIMEOUT_S)
        await self.decisions.close()
        await self.tenancy.close()
        self.client.close()
        if self.index is not None:
            await self.index.close()
        if self._stores is not None:
            await self._stores.registry.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self.recorder is not None:
            self.recorder.close()
        if self._usage_files is not None:
            await asyncio.to_thread(self._usage_files.close)

    def reason_for(self, replica: Replica) -> str:
        """Say why a replica is not live or not EXACT, "" when it is."""
        reason = replica.reason or replica.report.reason
        if reason or self._bridges is None or replica.pool is not None:
            return reason
        return self._bridges.reason_for(replica.id)

    def can_serve(self, model: str, *, isolated: bool) -> bool:
        """Whether some replica of a model may serve an isolated tenant, if it is one."""
        serving = self.view.serving(model)
        return any(replica.kind != "openai" or not isolated for replica in serving)

    async def tokenizer(self, model: str) -> Tokenizing | None:
        """Return how requests for a model are tokenized, None when only stock engines serve it."""
        known = self._tokenizing.get(model)
        if known is not None and known[0] == self.view.version:
            return known[1]
        version = self.view.version
        tokenizing = await self._tokenizing_of(model)
        is_settled = tokenizing is None or tokenizing.encoder is not None
        if is_settled and model in self.view.models():
            self._tokenizing[model] = version, tokenizing
        return tokenizing

    async def _tokenizing_of(self, model: str) -> Tokenizing | None:
        replicas = [r for r in self.view.serving(model) if r.pool is not None]
        pool = next((r.pool for r in replicas if r.pool is not None), None)
        if pool is None:
            return None
        lengths = [r.max_model_len for r in replicas if r.max_model_len is not None]
        longest = max(lengths) if lengths else None
        # Live ones first: a dead one would cost a connect time-out.
        sources = [
            Source(r.id, r.url, r.headers)
            for r in sorted(replicas, key=lambda r: not r.live)
            if r.kind == "prefixfleet"
        ]
        encoder = await self._tokenizers.get(pool, sources, max_model_len=longest)
        return Tokenizing(encoder, pool.scheme, longest, is_foreign=not sources)

    async def _refresh(self) -> None:
        await self.view.refresh()
        self.watch.look()
        self._welcome()
        for replica in self.view.replicas:
            if not replica.live:
                self.history.forget(replica.id)
        for model in self.view.models():
            await self.tokenizer(model)

    def _welcome(self) -> None:
        """Let those who wait be placed on replicas that were not live before."""
        live = {replica.id for replica in self.view.replicas if replica.live}
        if live - self._known_live:
            self.planner.look_again()
            self.turns.offer()
        self._known_live = live

    async def _every(self, seconds: float, poll: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await poll()
            except Exception:
                # The border of a task that must outlive whatever one look at the fleet meets.
                log.exception("polling failed")

    def _forget_replicas(self, replicas: Sequence[str]) -> None:
        self.planner.forget(replicas)
        for replica in replicas:
            self.history.forget(replica)

    def _count_refusal(self, refusal: Refusal) -> None:
        self.metrics.refused.labels(refusal.replica).inc()


def _recorder(config: RecordConfig | None, clock: Clock, seat: Seat | None) -> Recorder | None:
    """Open the recording; processes of one gateway write files of their own, with one key."""
    if config is None:
        return None
    path = Path(config.path)
    if seat is None or seat.is_alone:
        return Recorder(path, max_bytes=config.max_bytes, now=clock.monotonic())
    return Recorder(
        path.with_stem(f"{path.stem}.p{seat.number}"),
        max_bytes=config.max_bytes // seat.num_processes,
        now=seat.recording.started_at,
        key=seat.recording.key,
    )

"""What the handlers of a replica's front share: the engine, the prompts, the state.

It knows no HTTP: handlers ask it for the engine and get an error that they can show.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from engine.frontend.errors import RequestError
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from engine.messages import LoRARequest, SleepLevel
from kvindex.foundation.clock import Clock
from kvindex.index import TrustMode
from kvindex.ingest import Ingester
from worker.core.client import EngineClient
from worker.server.adapters import ServedAdapters
from worker.server.encode_pool import EncodePool
from worker.server.metrics import FrontMetrics
from worker.server.output_rules import OutputRules
from worker.server.spec import ReplicaSpec

FrontStatus = Literal["starting", "ready", "draining", "dead"]


class ReplicaFront:
    """The state of one replica's front, from its first breath to its last.

    starting -> ready -> draining, and dead from anywhere. `created_at` is the Unix time of the
    start. `port` is the bound one. `num_active` counts generations in flight. `ingesters` keep
    the fleet's index, one per data-parallel rank; none on its own. `changes` is held by whoever
    changes what is served.
    """

    def __init__(self, spec: ReplicaSpec, bundle: TokenizerBundle, clock: Clock) -> None:
        self.spec = spec
        self.bundle = bundle
        self.clock = clock
        self.pool = EncodePool(num_threads=spec.num_encode_threads)
        self.metrics = FrontMetrics(spec.served_models[0])
        self.created_at = int(clock.now())
        self.status: FrontStatus = "starting"
        self.reason = "the engine is loading"
        self.num_active = 0
        self.port = spec.port
        self.ingesters: dict[int, Ingester] = {}
        self.adapters = ServedAdapters(
            model_folder=None if spec.executor == "scripted" else Path(spec.model_folder),
            taken_names=spec.served_models,
            num_ranks=spec.tensor_parallel_size,
        )
        self.changes = asyncio.Lock()
        self._rest_reason: str | None = None
        self._client: EngineClient | None = None
        self._prompts: PromptEncoder | None = None
        self._rules: OutputRules | None = None

    def become_ready(self, client: EngineClient, prompts: PromptEncoder) -> None:
        """Serve from now on."""
        self._client, self._prompts = client, prompts
        self._rules = OutputRules(
            self.bundle,
            prompts.encoder,
            vocab_size=client.info.vocab_size,
            tool_call_parser=self.spec.tool_call_parser,
            reasoning_parser=self.spec.reasoning_parser,
        )
        if self.status == "starting":
            self.status, self.reason = "ready", ""

    def close(self) -> None:
        """Stop what runs in threads."""
        self.pool.close()
        if self._rules is not None:
            self._rules.close()

    def become_draining(self) -> None:
        """Take no new requests; those in flight go on."""
        if self.status != "dead":
            self.status, self.reason = "draining", "this replica is shutting down"

    def become_dead(self, reason: str) -> None:
        """Say that the engine is gone."""
        self.status, self.reason = "dead", reason

    @contextlib.contextmanager
    def resting(self, reason: str) -> Iterator[None]:
        """Take no new requests inside the block, and tell gateways so."""
        self._rest_reason = reason
        self.report_now()
        try:
            yield
        finally:
            self._rest_reason = None

    @property
    def sleep_level(self) -> SleepLevel | None:
        """How deeply the deepest sleeper of the engine cores sleeps, None while all are awake."""
        cores = self._client.ranks if self._client is not None else ()
        levels = [core.stats.sleep_level for core in cores]
        return max((level for level in levels if level is not None), default=None)

    @property
    def rest_reason(self) -> str | None:
        """Why this replica takes nothing although it is well, None while it does."""
        if self._rest_reason is None and self.sleep_level is not None:
            return f"this replica sleeps at level {self.sleep_level}"
        return self._rest_reason

    def report_now(self) -> None:
        """Have the index told at once how this replica does."""
        for ingester in self.ingesters.values():
            ingester.report_now()

    async def publish_record(self) -> None:
        """Put what this replica is now into the registry, before anything builds on it."""
        for ingester in self.ingesters.values():
            await ingester.publish_record()

    @property
    def url(self) -> str:
        """Where a gateway reaches this replica."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return self.spec.advertised_url or f"http://{host}:{self.port}"

    @property
    def index_mode(self) -> TrustMode:
        """How far the fleet's index can be trusted about this replica: as about its worst rank."""
        modes = {ingester.mode for ingester in self.ingesters.values()}
        if not modes or "FALLBACK" in modes:
            return "FALLBACK"
        return "DEGRADED" if "DEGRADED" in modes else "EXACT"

    @property
    def has_engine(self) -> bool:
        """Tell whether there is an engine to ask."""
        client = self._client
        return client is not None and client.dead_reason is None and self.status != "dead"

    @property
    def client(self) -> EngineClient:
        """The engine; RequestError while there is none."""
        if self._client is None or self.status == "dead":
            kind = "engine_dead" if self.status == "dead" else "starting"
            raise RequestError(kind, self.reason, retry_after_s=1.0)
        if self._client.dead_reason is not None:
            raise RequestError("engine_dead", self._client.dead_reason)
        return self._client

    @property
    def prompts(self) -> PromptEncoder:
        """The prompt encoder; RequestError before the engine is ready."""
        if self._prompts is None:
            raise RequestError("starting", self.reason, retry_after_s=1.0)
        return self._prompts

    @property
    def rules(self) -> OutputRules:
        """What outputs must look like; RequestError before the engine is ready."""
        if self._rules is None:
            raise RequestError("starting", self.reason, retry_after_s=1.0)
        return self._rules

    def admit(self) -> EngineClient:
        """Return the engine for a new generation; RequestError when none may begin."""
        if self.status == "draining":
            raise RequestError("draining", self.reason, retry_after_s=1.0)
        client, rest_reason = self.client, self.rest_reason
        if rest_reason is not None:
            raise RequestError("sleeping", rest_reason, retry_after_s=1.0)
        return client

    def trouble(self) -> str | None:
        """Say why this replica should get no traffic, None if it should."""
        if self.status != "ready":
            return self.reason
        client = self._client
        assert client is not None
        if client.dead_reason is not None:
            return client.dead_reason
        if not self.is_heard(client, within_s=self.spec.lease_s):
            silent_s = self.clock.monotonic() - client.last_heard_at
            return f"the engine has not been heard for {silent_s:.0f} s"
        return self.rest_reason

    def degradation(self) -> str | None:
        """Say which of several engine cores is gone or silent, None while all are well."""
        ranks = self._client.ranks if self._client is not None else ()
        bad = [
            f"rank {rank}: {core.dead_reason or 'silent'}"
            for rank, core in enumerate(ranks)
            if not self.is_heard(core, within_s=self.spec.lease_s)
        ]
        return "; ".join(bad) or None

    def is_heard(self, client: EngineClient, *, within_s: float) -> bool:
        """Tell whether an engine lives and has shown it within the last seconds."""
        silent_s = self.clock.monotonic() - client.last_heard_at
        return client.dead_reason is None and silent_s <= within_s

    def require_model(self, model: str) -> LoRARequest | None:
        """Return the adapter that a model name stands for, None for the model itself.

        `model_not_found` unless this replica serves it.
        """
        if model in self.spec.served_models:
            return None
        adapter = self.adapters.get(model)
        if adapter is None:
            names = [*self.spec.served_models, *(one.name for one in self.adapters)]
            raise RequestError(
                "model_not_found",
                f"the model {model!r} is not served here; served: {', '.join(names)}",
                param="model",
            )
        return adapter

"""What the handlers of a replica's front share: the engine, the prompts, the state.

It knows no HTTP: handlers ask it for the engine and get an error that they can show.
"""

from __future__ import annotations

from typing import Literal

from engine.frontend.errors import RequestError
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.clock import Clock
from kvindex.index import TrustMode
from kvindex.ingest import Ingester
from worker.core.client import EngineClient
from worker.server.encode_pool import EncodePool
from worker.server.metrics import FrontMetrics
from worker.server.spec import ReplicaSpec

FrontStatus = Literal["starting", "ready", "draining", "dead"]


class ReplicaFront:
    """The state of one replica's front, from its first breath to its last.

    starting -> ready -> draining, and dead from anywhere. `created_at` is the Unix time of the
    start. `port` is the bound one. `num_active` counts generations in flight. `ingesters` keep
    the fleet's index, one per data-parallel rank; none on its own.
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
        self._client: EngineClient | None = None
        self._prompts: PromptEncoder | None = None

    def become_ready(self, client: EngineClient, prompts: PromptEncoder) -> None:
        """Serve from now on."""
        self._client, self._prompts = client, prompts
        if self.status == "starting":
            self.status, self.reason = "ready", ""

    def become_draining(self) -> None:
        """Take no new requests; those in flight go on."""
        if self.status != "dead":
            self.status, self.reason = "draining", "this replica is shutting down"

    def become_dead(self, reason: str) -> None:
        """Say that the engine is gone."""
        self.status, self.reason = "dead", reason

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

    def admit(self) -> EngineClient:
        """Return the engine for a new generation; RequestError when none may begin."""
        if self.status == "draining":
            raise RequestError("draining", self.reason, retry_after_s=1.0)
        return self.client

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
        return None

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

    def require_model(self, model: str) -> None:
        """Raise `model_not_found` unless this replica serves the model."""
        if model not in self.spec.served_models:
            served = ", ".join(self.spec.served_models)
            raise RequestError(
                "model_not_found",
                f"the model {model!r} is not served here; served: {served}",
                param="model",
            )

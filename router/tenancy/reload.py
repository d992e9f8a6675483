"""Reading the configuration again while the gateway runs: tenants, keys, policies.

All of a good file is applied in one step between two requests; of a bad one nothing, and it is said
where it is wrong. What the gateway has learned (load, breakers, tokenizers, limits) stays. It knows
how to load a file, and nothing of what the settings mean.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

import msgspec

from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from router.config import GENERATED_KEY, ConfigSource, RouterConfig, TenantConfig
from router.hot_settings import needs_restart
from router.launch.config import load_fleet_config
from router.observe.metrics import GatewayMetrics
from router.tenancy.live_directory import LiveDirectory
from router.tenancy.policies import TenantPolicies

log = logging.getLogger("prefixfleet.router.reload")


class ReloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one attempt. `needs_restart` names settings that changed and are not applied."""

    result: Literal["applied", "unchanged", "rejected"]
    version: int
    error: str | None = None
    needs_restart: tuple[str, ...] = ()


class ConfigState(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in use: `version` counts from 1, `applied_at` is in Unix seconds."""

    file: str | None
    version: int
    applied_at: float
    last: ReloadResult | None = None


class ConfigReload:
    """Reads the file of one gateway again: when asked, and when it has changed."""

    def __init__(
        self,
        source: ConfigSource | None,
        *,
        running: RouterConfig,
        live: LiveDirectory,
        policies: TenantPolicies,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._source = source
        self._running = running
        self._live = live
        self._policies = policies
        self._metrics = metrics
        self._clock = clock
        self._reading = asyncio.Lock()
        self._seen = self._stamp()
        self.state = ConfigState(
            file=source.file if source is not None else None, version=1, applied_at=clock.now()
        )

    async def reload(self) -> ReloadResult:
        """Read the file and apply it; a mistake in it is the result, not an error."""
        async with self._reading:
            self._seen = self._stamp()
            result = await self._reload()
            self._metrics.config_reloads.labels(result.result).inc()
            if result.result == "applied":
                self.state = msgspec.structs.replace(
                    self.state, version=result.version, applied_at=self._clock.now()
                )
            self.state = msgspec.structs.replace(self.state, last=result)
        level = logging.ERROR if result.result == "rejected" else logging.INFO
        log.log(level, "configuration %s version=%d", result.result, result.version)
        if result.error is not None:
            log.error("configuration refused, the old one stays: %s", result.error)
        if result.needs_restart:
            log.warning("not applied before a restart: %s", ", ".join(result.needs_restart))
        return result

    async def at_start(self) -> None:
        """Read the file once more: a gateway that was started again was handed older settings."""
        if self._seen is not None:
            await self.reload()

    async def follow(self) -> None:
        """Read the file if it is another than last time; a missing one is left alone."""
        if self._stamp() not in (None, self._seen):
            await self.reload()

    async def _reload(self) -> ReloadResult:
        version = self.state.version
        if self._source is None or self._source.file is None:
            return ReloadResult(
                result="rejected",
                version=version,
                error="this gateway was started without a configuration file",
            )
        try:
            file, overrides = Path(self._source.file), self._source.overrides
            config = await asyncio.to_thread(load_fleet_config, file, overrides)
            router = config.section("router", RouterConfig)
            tenants = self._with_generated_keys(config.entries("tenants", TenantConfig))
            changed = self._apply(router, tenants)
        except ConfigError as error:
            text = str(error)
            if self._source.file not in text:
                text = f"{self._source.file}: {text}"
            return ReloadResult(result="rejected", version=version, error=text)
        return ReloadResult(
            result="applied" if changed else "unchanged",
            version=version + changed,
            needs_restart=needs_restart(self._running, router),
        )

    def _apply(self, router: RouterConfig, tenants: list[TenantConfig]) -> bool:
        """Swap tenants and the default policy; raise ConfigError and change nothing if wrong."""
        policy = (router.default_policy, router.default_policy_params)
        declared = list(self._live.current.declared.values())
        if policy == self._policies.default and tenants == declared:
            return False
        before, self._policies.default = self._policies.default, policy
        try:
            self._live.declare(tenants)
        except ConfigError:
            self._policies.default = before
            raise
        return True

    def _with_generated_keys(self, tenants: list[TenantConfig]) -> list[TenantConfig]:
        """Let tenants that declare no key keep the one that was made for them at the start."""
        declared = self._live.current.declared
        kept = []
        for tenant in tenants:
            known = declared.get(tenant.name)
            if known is not None and not tenant.keys and not tenant.anonymous:
                keys = tuple(key for key in known.keys if key.alias == GENERATED_KEY)
                tenant = msgspec.structs.replace(tenant, keys=keys)
            kept.append(tenant)
        return kept

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return what changes whenever the file does, None when it is not there."""
        if self._source is None or self._source.file is None:
            return None
        try:
            status = Path(self._source.file).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

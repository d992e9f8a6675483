"""A reload from the request to its end: read the file again, plan, say what will be done, do it.

It knows how a configuration becomes a plan beside a running one; what differs is reload_plan.py's,
how it is brought about roll.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import ConfigError
from router.config import ConfigSource, RouterConfig, TenantConfig
from router.launch.config import load_fleet_config
from router.launch.control import Reloaded, ReloadRequest, Say
from router.launch.live_fleet import LiveFleet
from router.launch.model_folder import PreparedModel, chosen_model
from router.launch.plan import FleetPlan, make_plan
from router.launch.reload_plan import ReloadPlan, plan_reload
from router.launch.roll import Roll
from router.launch.secrets import load_or_create_secrets, provide_keys
from router.tenancy.tenants import TenantDirectory

_OF_THE_MODEL = ("model", "dtype", "cache_dir")


class Reloader:
    """Reloads one live fleet."""

    def __init__(self, live: LiveFleet) -> None:
        self._live = live

    async def reload(self, request: ReloadRequest, say: Say) -> Reloaded:
        """Carry a reload out; its progress goes to `say` beside whoever started the fleet.

        Raises ConfigError and DependencyError before anything is touched, and what a roll raises.
        """
        source = self._source(request)
        with self._live.heard_by(say):
            plan = await asyncio.to_thread(self._plan, source, self._from_a_thread())
            steps = list(plan.lines())
            tell = say if request.dry_run else self._live.say
            for step in steps:
                tell(step)
            if not request.dry_run and not plan.is_empty:
                await Roll(self._live, plan).carry_out()
        return Reloaded(steps=steps, done=not request.dry_run)

    def _source(self, request: ReloadRequest) -> ConfigSource:
        """Return where the configuration comes from, with the flags of `up` and of this request."""
        source = self._live.plan.gateway.source
        assert source is not None, "of a fleet"
        if request.file not in (None, source.file):
            raise ConfigError(
                f"{request.file}: this fleet was started with {source.file}; change that file, or "
                "leave -c out"
            )
        overrides = {**source.overrides, **request.overrides}
        return msgspec.structs.replace(source, overrides=overrides)

    def _from_a_thread(self) -> Say:
        """Return what lets another thread say something."""
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:
            loop.call_soon_threadsafe(self._live.say, text)

        return say

    def _plan(self, source: ConfigSource, say: Say) -> ReloadPlan:
        """Read the file and lay out the way there; blocks, and is run in a thread."""
        live = self._live
        assert source.file is not None, "of a fleet"
        config = load_fleet_config(Path(source.file), source.overrides)
        known_keys = live.file.keys
        tenants, keys = provide_keys(config.entries("tenants", TenantConfig), known_keys)
        TenantDirectory(tenants)
        wanted = make_plan(
            config,
            source=source,
            run_dir=live.run_dir,
            router=_router_beside(live.plan, config),
            tenants=tenants,
            secrets=load_or_create_secrets(live.run_dir),
            model=_model_beside(live.plan, config, say=say),
            ports=live.ports,
        )
        return plan_reload(live.plan, wanted, keys=keys, known_keys=known_keys)


def _router_beside(running: FleetPlan, config: LoadedConfig) -> RouterConfig:
    """Return the settings of the gateway; where any free port is wanted, it has one."""
    router, now = config.section("router", RouterConfig), running.gateway.router
    return msgspec.structs.replace(
        router, port=router.port or now.port, admin_port=router.admin_port or now.admin_port
    )


def _model_beside(
    running: FleetPlan, config: LoadedConfig, *, say: Callable[[str], None]
) -> PreparedModel:
    """Return the model, which is prepared only if another one is asked for."""
    old, new = running.config.plain("worker"), config.plain("worker")
    same = all(old[name] == new[name] for name in _OF_THE_MODEL)
    if same and running.config.plain("fleet")["executor"] == config.plain("fleet")["executor"]:
        return running.model
    say(f"model {new['model']} …")
    return chosen_model(config, say=say)

"""Carries a reload out while the fleet serves: one replica after the other, then the gateway.

A replica is drained before it ends, and the next one has its turn when the last is ready, seen by
the gateway and EXACT. One that does not come back gets its old settings again and stops the reload.
What has to change is reload_plan.py's to say.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from router.config import GatewaySpec
from router.launch.children import ReplicaSettings
from router.launch.http_call import Answer, call
from router.launch.inspect import refusal
from router.launch.live_fleet import LiveFleet, restart_policy
from router.launch.reload_plan import ReloadPlan
from router.launch.supervisor import ChildFailedError

_POLL_S = 0.1
_EXIT_NOT_UP = 4


class ReloadStoppedError(PrefixFleetError):
    """Raised when a process did not come back with its new settings; the others go on serving."""

    kind = "reload_stopped"
    exit_code = _EXIT_NOT_UP


class _Seen(NamedTuple):
    """A replica as the gateway sees it: its epoch, None if unknown, and why it is not EXACT."""

    epoch: int | None
    problem: str | None
    is_refused: bool = False


class Roll:
    """One reload of a live fleet."""

    def __init__(self, live: LiveFleet, plan: ReloadPlan) -> None:
        self._live = live
        self._plan = plan
        self._timeout_s = plan.wanted.fleet.ready_timeout_s

    async def carry_out(self) -> None:
        """Do all of it, saying what is done.

        Raises ConfigError or DependencyError before anything is touched, ReloadStoppedError when a
        replica or a gateway process does not come back.
        """
        live, plan = self._live, self._plan
        await self._apply()
        for settings in plan.starts:
            await self._start_new(settings)
        for settings, _ in plan.restarts:
            await self._restart(settings)
        for name in plan.stops:
            live.say(f"{name}: draining …")
            await live.supervisor.stop([name])
            live.drop(name)
        if plan.gateway:
            await self._replace_gateway()

    async def _apply(self) -> None:
        """Have the gateway take what needs no restart; it refuses a file that it cannot use."""
        answer = await self._ask("/admin/config/reload", method="POST")
        if answer.status == 422:
            raise ConfigError(refusal(answer) or "the gateway refuses the configuration")
        if answer.status != 200:
            raise DependencyError(f"the gateway answered {answer.status} to the reload")
        live, wanted = self._live, self._plan.wanted
        live.supervisor.use_policy(restart_policy(wanted.fleet))
        live.plan = replace(
            live.plan,
            config=wanted.config,
            fleet=wanted.fleet,
            model=wanted.model,
            gateway=_with_hot_settings(live.plan.gateway, wanted.gateway),
        )

    async def _start_new(self, settings: ReplicaSettings) -> None:
        live, name = self._live, settings.replica_id
        live.say(f"{name}: starting …")
        live.take_in(settings)
        try:
            await self._start(settings, old_epoch=None)
        except ChildFailedError as error:
            await live.supervisor.stop([name])
            live.drop(name)
            raise ReloadStoppedError(
                f"{name} does not come up: {self._why(name, error)}; the reload stops here, the "
                "fleet serves on"
            ) from None

    async def _restart(self, settings: ReplicaSettings) -> None:
        live, name = self._live, settings.replica_id
        old = next(known for known in live.plan.replicas if known.replica_id == name)
        epoch = (await self._look(name)).epoch
        if len(live.plan.replicas) == 1:
            live.say(f"warning: {name} is the only replica; requests are refused until it is back")
        live.say(f"{name}: draining …")
        await live.supervisor.stop([name])
        live.take_in(settings)
        try:
            await self._start(settings, old_epoch=epoch)
        except ChildFailedError as error:
            why = self._why(name, error)
            live.say(f"{name} does not come back: {why}; putting its old settings back …")
            await live.supervisor.stop([name])
            live.take_in(old)
            await self._put_back(old, epoch)
            raise ReloadStoppedError(
                f"{name} did not come back with the new settings: {why}; it runs again with the "
                "old ones, and so does what has not had its turn"
            ) from None

    async def _put_back(self, old: ReplicaSettings, epoch: int | None) -> None:
        name = old.replica_id
        try:
            await self._start(old, old_epoch=epoch)
        except ChildFailedError as error:
            await self._live.supervisor.stop([name])
            self._live.drop(name)
            raise ReloadStoppedError(
                f"{name} came back neither with the new settings nor with the old ones: {error}; "
                "the others serve on without it, the next reload starts it again"
            ) from None

    async def _start(self, settings: ReplicaSettings, *, old_epoch: int | None) -> None:
        """Start a replica and wait until the gateway may trust it; ChildFailedError if not."""
        supervisor, name = self._live.supervisor, settings.replica_id
        supervisor.start(self._live.replica_child(settings), is_needed=False)
        started_at = time.monotonic()
        await supervisor.wait_ready([name], timeout_s=self._timeout_s)
        while (seen := await self._look(name)).problem or not _is_newer(seen.epoch, old_epoch):
            supervisor.check(name)
            if seen.is_refused or time.monotonic() > started_at + self._timeout_s:
                problem = seen.problem or "the gateway still sees the old process"
                raise ChildFailedError(f"{name} is not EXACT: {problem}", exit_code=_EXIT_NOT_UP)
            await asyncio.sleep(_POLL_S)
        supervisor.need(name)
        self._live.say(f"{name} is EXACT after {time.monotonic() - started_at:.1f} s")

    async def _replace_gateway(self) -> None:
        """Let each process of the gateway have a successor, which takes its seat."""
        live, old = self._live, self._live.plan.gateway
        live.plan = replace(live.plan, gateway=self._plan.wanted.gateway)
        try:
            for number, name in enumerate(live.gateway_names):
                live.say(f"{name}: starting its successor …")
                child = live.gateway_child(number)
                await live.supervisor.replace(child, timeout_s=self._timeout_s)
        except BaseException as error:
            live.plan = replace(live.plan, gateway=old)
            live.write_gateway_spec()
            if not isinstance(error, ChildFailedError):
                raise
            raise ReloadStoppedError(
                f"the successor of {name} does not serve: {error}; the old process goes on"
            ) from None
        made = self._plan.keys.keys() - live.file.keys.keys()
        live.file.keys = self._plan.keys
        live.rewrite_file()
        for tenant in sorted(made):
            live.say(f"the key of tenant {tenant} is in {live.run_dir.fleet_file}")

    def _why(self, name: str, error: ChildFailedError) -> str:
        """Return the reason of a failure, and where there may be more of it."""
        log = str(self._live.run_dir.log_file(name))
        return str(error) if log in str(error) else f"{error} (log: {log})"

    async def _look(self, name: str) -> _Seen:
        """Ask the gateway how it sees a replica; one that does not answer sees nothing."""
        try:
            answer = await self._ask("/admin/replicas")
        except DependencyError as error:
            return _Seen(None, str(error))
        if answer.status != 200:
            return _Seen(None, f"the gateway answered {answer.status}")
        for refused in answer.body["refused"]:
            if refused["replica"] == name:
                return _Seen(None, f"the gateway refuses it: {refused['reason']}", is_refused=True)
        return _seen(answer.body["replicas"], name)

    async def _ask(self, path: str, *, method: str = "GET") -> Answer:
        file = self._live.file
        return await asyncio.to_thread(
            call, f"{file.admin_url}{path}", key=file.admin_key, method=method, trust=file.trust
        )


def _seen(replicas: list[dict[str, Any]], name: str) -> _Seen:
    replica = next((r for r in replicas if r["id"] == name), None)
    if replica is None:
        return _Seen(None, "the gateway does not know it yet")
    if not replica["live"]:
        return _Seen(replica["epoch"], "its lease has lapsed")
    if replica["mode"] != "EXACT":
        return _Seen(replica["epoch"], f"{replica['mode']}: {replica['reason']}")
    return _Seen(replica["epoch"], None)


def _is_newer(epoch: int | None, old_epoch: int | None) -> bool:
    return old_epoch is None or (epoch is not None and epoch > old_epoch)


def _with_hot_settings(running: GatewaySpec, wanted: GatewaySpec) -> GatewaySpec:
    """Return the settings of a gateway that has read its file again."""
    router = msgspec.structs.replace(
        running.router,
        default_policy=wanted.router.default_policy,
        default_policy_params=wanted.router.default_policy_params,
    )
    return msgspec.structs.replace(running, router=router, tenants=wanted.tenants)

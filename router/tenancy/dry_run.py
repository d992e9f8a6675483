"""What another policy would have done with a tenant's recorded traffic: two replays, compared.

The simulator runs as a child process, one at a time, for a limited time and at low priority; the
gateway never imports it. It decides nothing about the live fleet.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvindex.foundation.errors import PrefixFleetError
from router.config import TenantConfig
from router.tenancy.dry_run_outcome import Outcome, caveats, changes
from router.tenancy.policies import PolicyChoice, policy_of

TIMEOUT_S = 120.0
MAX_ROWS = 20_000
_MAX_ERROR_CHARS = 400


class DryRunFailedError(PrefixFleetError):
    """Raised when a replay did not come to its end; the message is the simulator's."""

    kind = "dry_run_failed"


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """What the replay takes for the fleet: `blocks` are those of each replica."""

    replicas: int
    blocks: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The two replays: `now` by the policies in force, `then` with the tenant's new one.

    `latency` names the simulator's profile: compare the two, and take no second for the fleet's.
    `sentences` say what the numbers show, most important first.
    """

    tenant: str
    requests: int
    recorded_rows: int
    fleet: SimulatedFleet
    latency: str
    now: Outcome
    then: Outcome
    sentences: list[str]


class _Ttft(msgspec.Struct, frozen=True):
    p50: float
    p99: float


class _Tenant(msgspec.Struct, frozen=True):
    requests: int
    shed: int
    token_hit: float | None
    ttft_s: _Ttft | None


class _Replica(msgspec.Struct, frozen=True):
    uncached_tokens: int


class _Report(msgspec.Struct, frozen=True):
    """The part of the simulator's report that is compared."""

    token_hit: float | None
    ttft_s: _Ttft | None
    tenants: dict[str, _Tenant]
    per_replica: list[_Replica]
    latency: str


class PolicyDryRun:
    """Runs replays for one gateway, one dry run after the other."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._one_at_a_time = asyncio.Lock()

    async def compare(
        self,
        trace: Path,
        num_rows: int,
        *,
        tenant: str,
        choice: PolicyChoice,
        tenants: Sequence[TenantConfig],
        default: PolicyChoice,
        fleet: SimulatedFleet,
    ) -> DryRun:
        """Replay a trace twice; raise DryRunFailedError when that cannot be, or takes too long."""
        current = {one.name: policy_of(one, default) for one in tenants}
        wanted = {**current, tenant: choice}
        async with self._one_at_a_time:
            now = await self._replay(trace, current, default=default, fleet=fleet)
            then = await self._replay(trace, wanted, default=default, fleet=fleet)
        before, after = _outcome(now, tenant, current[tenant]), _outcome(then, tenant, choice)
        requests = _of_tenant(now, tenant).requests
        return DryRun(
            tenant=tenant,
            requests=requests,
            recorded_rows=num_rows,
            fleet=fleet,
            latency=now.latency,
            now=before,
            then=after,
            sentences=[
                *changes(before, after, num_replicas=fleet.replicas),
                *caveats(requests, latency=now.latency),
            ],
        )

    async def _replay(
        self,
        trace: Path,
        policies: Mapping[str, PolicyChoice],
        *,
        default: PolicyChoice,
        fleet: SimulatedFleet,
    ) -> _Report:
        argv = [sys.executable, "-P", "-m", "router.cli", "replay", "run", str(trace), "--json"]
        argv += ["--mode", "open", "--no-bounds", "--guards", "gateway"]
        argv += ["--replicas", str(fleet.replicas), "--blocks", str(fleet.blocks)]
        argv += ["--policy", default[0], *_params(default[1])]
        for name, (policy, params) in policies.items():
            settings = [f"policy={policy}", *(f"param.{k}={v!r}" for k, v in params.items())]
            argv += ["--tenant", f"{name}:{','.join(settings)}"]
        return await self._run(argv)

    async def _run(self, argv: Sequence[str]) -> _Report:
        process = await asyncio.create_subprocess_exec(
            "nice",
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                output, errors = await process.communicate()
        except TimeoutError:
            raise DryRunFailedError(f"the replay took longer than {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            said = errors.decode("utf-8", "replace").strip()[-_MAX_ERROR_CHARS:]
            raise DryRunFailedError(f"the replay ended with {process.returncode}: {said}")
        return msgspec.json.decode(output, type=_Report)


def _params(params: Mapping[str, float]) -> list[str]:
    return [word for name, value in params.items() for word in ("--param", f"{name}={value!r}")]


def _of_tenant(report: _Report, tenant: str) -> _Tenant:
    found = report.tenants.get(tenant)
    if found is None or not found.requests:
        raise DryRunFailedError(f"nothing of tenant {tenant} is in the recording")
    return found


def _outcome(report: _Report, tenant: str, choice: PolicyChoice) -> Outcome:
    of_tenant = _of_tenant(report, tenant)
    computed = [replica.uncached_tokens for replica in report.per_replica]
    ttft, of_all = of_tenant.ttft_s, report.ttft_s
    return Outcome(
        policy=choice[0],
        params=choice[1],
        token_hit=of_tenant.token_hit,
        ttft_p50_s=ttft.p50 if ttft is not None else None,
        ttft_p99_s=ttft.p99 if ttft is not None else None,
        shed=of_tenant.shed,
        fleet_token_hit=report.token_hit,
        fleet_ttft_p99_s=of_all.p99 if of_all is not None else None,
        busiest_share=max(computed) / sum(computed) if sum(computed) else None,
    )

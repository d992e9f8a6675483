"""Where tenancy keeps what must persist: Redis for a fleet, memory for a lone gateway."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from redis.asyncio import Redis

from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import DependencyError
from kvindex.redis_connect import check_server, dependency_errors
from router.tenancy.fleet_limiter import FleetLimiter
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Limiter
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.memory_store import MemoryTenantStore
from router.tenancy.redis_limiter import RedisLimiter
from router.tenancy.redis_state import PREFIX
from router.tenancy.redis_store import RedisTenantStore
from router.tenancy.redis_usage import RedisUsageLog
from router.tenancy.stored import TenantStore
from router.tenancy.usage import UsageLog

log = logging.getLogger("prefixfleet.router.tenancy")


@dataclass(frozen=True, slots=True)
class TenancyStores:
    """The directory of tenants, the limits, and the usage that settlements write."""

    store: TenantStore
    limiter: Limiter
    usage: UsageLog


def redis_stores(redis: Redis, *, gateway: str, clock: Clock) -> TenancyStores:
    """Keep everything in one Redis, shared by any number of gateways; it is closed with them."""
    shared = RedisLimiter(redis, gateway=gateway, clock=clock)
    return TenancyStores(
        store=RedisTenantStore(redis),
        limiter=FleetLimiter(shared, gateway=gateway, clock=clock),
        usage=RedisUsageLog(redis),
    )


async def check_state_server(redis: Redis) -> None:
    """Log what is doubtful about a server that must persist; one that is away is waited for.

    Raises DependencyError for a server that is too old, or that may evict our keys.
    """
    try:
        with dependency_errors(redis):
            await redis.exists(f"{PREFIX}head")
    except DependencyError as error:
        log.warning("the state store is away at the start: %s", error)
        return
    for warning in await check_server(redis, must_persist=True):
        log.warning("%s", warning)


def memory_stores(*, gateway: str, clock: Clock) -> TenancyStores:
    """Keep everything in this process."""
    limiter = LocalLimiter(LimitLedger(), gateway=gateway, clock=clock)
    return TenancyStores(store=MemoryTenantStore(), limiter=limiter, usage=limiter)

"""Two gateways over one state Redis, with replicas of their own, and short calls of their APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvindex.config import RedisConfig
from kvindex.foundation.clock import Clock, SystemClock
from kvindex.redis_connect import connect
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.stores import TenancyStores, redis_stores
from tests.redis_server import RedisServer
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import ADMIN_KEY, Running, gateway_spec, running_gateway

PATIENT = RedisConfig(connect_timeout_s=10, call_timeout_s=10)
"""A busy machine must not look like a dead server; a killed one refuses at once."""


def tenant(name: str = "acme", **fields: Any) -> TenantConfig:
    """Return a declared tenant whose key is `sk-NAME`."""
    key = TenantKey(hash=key_hash(f"sk-{name}"), alias="ci")
    return TenantConfig(name=name, keys=(key,), **fields)


def limited(**limits: int) -> TenantConfig:
    """Return the declared tenant `acme` with limits."""
    return tenant(limits=Limits(**limits))


def over(server: RedisServer, clock: Clock | None = None) -> Callable[[str], TenancyStores]:
    """Return what opens the state store for a gateway id."""
    return lambda id: redis_stores(
        connect(server.url, PATIENT), gateway=id, clock=clock or SystemClock()
    )


@asynccontextmanager
async def two_gateways(
    server: RedisServer, *tenants: TenantConfig, cache_dir: str | None = None
) -> AsyncIterator[tuple[Running, Running]]:
    """Run two gateways with the same declared tenants over one server."""
    spec = gateway_spec(tenants=tenants, cache_dir=cache_dir)
    async with (
        running_gateway(spec, replicas=1, id="one", tenancy=over(server)) as one,
        running_gateway(spec, replicas=1, id="other", tenancy=over(server)) as other,
    ):
        yield one, other


async def made(running: Running, path: str, body: Any, *, key: str = ADMIN_KEY) -> Any:
    """POST to the admin API and return what was made."""
    status, answer = await running.admin(path, method="POST", body=body, key=key)
    assert status == 201, answer
    return answer


async def make_tenant(running: Running, name: str = "acme", **fields: Any) -> str:
    """Make a tenant through the admin API, with a key `ci`; return the key."""
    await made(running, "/admin/tenants", {"name": name, **fields})
    answer = await made(running, f"/admin/tenants/{name}/keys", {"alias": "ci"})
    key: str = answer["key"]
    return key

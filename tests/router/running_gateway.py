"""A gateway on free ports over memory stores, with any number of fake replicas.

The stores can be switched off and emptied, as a Redis can.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from openai import AsyncOpenAI

from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from kvindex.index import PrefixIndex
from kvindex.memory_index import AsyncMemoryIndex, MemoryIndex
from kvindex.memory_registry import MemoryRegistry
from kvindex.registry import ReplicaRecord, pool_id
from router.app import build_admin_app, build_client_app
from router.assembly import Gateway, Stores
from router.config import GatewaySpec, RouterConfig, TenantConfig, TenantKey
from router.tenancy.stores import TenancyStores
from tests.conditions import until
from tests.router.fake_replica import IDENTITY, MODEL, SCHEME, TOKEN, FakeReplica, key_hash

ACME_KEY, GLOBEX_KEY = "sk-acme-0123456789", "sk-globex-0123456789"
POOL_ID = pool_id(MODEL, IDENTITY, SCHEME)
ADMIN_KEY = "admin-key-of-the-fleet"
TENANTS = (
    TenantConfig(name="acme", keys=(TenantKey(hash=key_hash(ACME_KEY), alias="ci"),)),
    TenantConfig(name="globex", keys=(TenantKey(hash=key_hash(GLOBEX_KEY)),)),
)


class MemoryStores:
    """Registry and indexes in memory.

    `down` makes every call fail, `silent` lets none return, `clear` empties them.
    """

    def __init__(self) -> None:
        self.down = False
        self.silent = False
        self.registry = MemoryRegistry()
        self._indexes: dict[str, MemoryIndex] = {}
        self.num_calls = 0

    def memory(self, pool: str) -> MemoryIndex:
        """Return the index of a pool itself."""
        return self._indexes.setdefault(pool, MemoryIndex())

    def index(self, pool: str) -> AsyncMemoryIndex:
        """Return the asynchronous face of the index of a pool."""
        return AsyncMemoryIndex(self.memory(pool))

    def clear(self) -> None:
        """Forget everything, like a server that was restarted empty."""
        self.registry = MemoryRegistry()
        self._indexes.clear()

    def for_gateway(self) -> Stores:
        """Return the stores behind the switch."""
        registry: Any = _Switched(self, lambda: self.registry)

        def open_index(pool: str) -> PrefixIndex:
            index: Any = _Switched(self, lambda: self.index(pool))
            return index  # type: ignore[no-any-return]

        return Stores(registry, open_index)


class _Switched:
    """Passes every call on while the stores are up, and fails it while they are down."""

    def __init__(self, stores: MemoryStores, current: Callable[[], object]) -> None:
        self._stores = stores
        self._current = current

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._stores.num_calls += 1
            if self._stores.silent and name != "close":
                await asyncio.Event().wait()
            if self._stores.down and name != "close":
                raise DependencyError("Redis at redis://127.0.0.1:1/0: connection refused")
            return await getattr(self._current(), name)(*args, **kwargs)

        return call


@dataclass(slots=True)
class Running:
    """A gateway that listens, its replicas, and a session to talk to it."""

    gateway: Gateway
    stores: MemoryStores
    replicas: list[FakeReplica]
    url: str
    admin_url: str
    session: aiohttp.ClientSession
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def client(self, key: str = ACME_KEY) -> AsyncOpenAI:
        """Return the official client, without retries of its own."""
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    async def post(
        self, path: str, body: Any, *, key: str | None = ACME_KEY, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """POST JSON (or bytes as they are): status, decoded body, headers in lower case."""
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        headers.setdefault("content-type", "application/json")
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, headers=headers, data=data) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), names

    async def admin(
        self, path: str, *, method: str = "GET", key: str | None = ADMIN_KEY, body: Any = None
    ) -> tuple[int, Any]:
        """Call the admin listener, with JSON unless `body` is None: status and decoded body."""
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        url = self.admin_url + path
        async with self.session.request(method, url, headers=headers, json=body) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def add(self, replica: FakeReplica, **changes: Any) -> ReplicaRecord:
        """Start and register a replica; returns when the gateway has seen it."""
        await replica.start()
        self.replicas.append(replica)
        record = await self.register(replica, **changes)
        await until(lambda: self.knows(record))
        return record

    async def register(self, replica: FakeReplica, **changes: Any) -> ReplicaRecord:
        """Register a running replica, again or for the first time."""
        return await replica.register(self.stores.registry, self.stores.index(POOL_ID), **changes)

    def knows(self, record: ReplicaRecord) -> bool:
        """Whether the gateway has taken or refused exactly this record."""
        taken = any(replica.record == record for replica in self.gateway.view.replicas)
        refusals = self.gateway.view.refusals
        return taken or any(r.replica == record.id and r.epoch == record.epoch for r in refusals)

    def index_load(self) -> tuple[int, int]:
        """Return what the index counts as reserved: requests and prefill tokens."""
        matches = self.stores.memory(POOL_ID).match([])
        return (
            sum(match.num_reserved for match in matches),
            sum(match.reserved_prefill_tokens for match in matches),
        )

    async def nothing_runs(self) -> None:
        """Return once planner and index count nothing any more; TimeoutError after 5 s."""
        await until(lambda: self.num_active() == 0 and self.index_load() == (0, 0))

    def num_active(self) -> int:
        """Return the requests that the planner counts as running."""
        return sum(account.num_active for account in self.gateway.planner.ledger.accounts.values())


def gateway_spec(
    *, tenants: tuple[TenantConfig, ...] = TENANTS, cache_dir: str | None = None, **router: Any
) -> GatewaySpec:
    """Return a spec with quick polling; `router` are fields of RouterConfig."""
    fields: dict[str, Any] = {"port": 0, "admin_port": 0, "poll_s": 0.02, "index_timeout_s": 2.0}
    return GatewaySpec(
        router=RouterConfig(**(fields | router)),
        tenants=tenants,
        fleet_secret="secret-of-the-fleet",
        internal_token=TOKEN,
        admin_key=ADMIN_KEY,
        cache_dir=cache_dir,
    )


@asynccontextmanager
async def running_gateway(
    spec: GatewaySpec | None = None,
    *,
    replicas: int = 2,
    stores: MemoryStores | None = None,
    with_index: bool = True,
    id: str = "gw-test",
    tenancy: Callable[[str], TenancyStores] | None = None,
) -> AsyncIterator[Running]:
    """Serve a gateway exactly as production does; `replicas` fake ones are there and known.

    `tenancy` opens the state store for a gateway id; without it, the gateway keeps its own.
    """
    stores = stores or MemoryStores()
    gateway = Gateway(
        spec or gateway_spec(),
        id=id,
        clock=SystemClock(),
        stores=stores.for_gateway() if with_index else None,
        tenancy_stores=tenancy(id) if tenancy is not None else None,
    )
    runners: list[web.AppRunner] = []
    urls: list[str] = []
    for app in (build_client_app(gateway), build_admin_app(gateway)):
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        runners.append(runner)
        urls.append(f"http://{host}:{port}")
    await gateway.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = Running(gateway, stores, [], urls[0], urls[1], session)
        try:
            for i in range(replicas):
                await running.add(FakeReplica(f"r{i}"))
            yield running
        finally:
            for client in running.clients:
                await client.close()
            for replica in running.replicas:
                await replica.stop()
            for runner in runners:
                await runner.cleanup()
            await gateway.close()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": MODEL, "prompt": prompt, **fields}

"""The directory of this moment: what is declared and what is stored, followed as either changes.

A store that came back empty, or older than what is known, is filled again from here. It knows no
limits and no requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from router.config import TenantConfig
from router.tenancy.snapshot import Snapshot, load_snapshot, save_snapshot
from router.tenancy.stored import StoredDirectory, TenantStore
from router.tenancy.tenants import TenantDirectory

log = logging.getLogger("prefixfleet.router.tenancy")


class LiveDirectory:
    """Tenants and keys, as `current`; `stored` is what of them the admin API has made.

    `check` raises ConfigError for a tenant that cannot be served. `on_change` is called with all
    tenants before they are swapped in; it may raise the same, and nothing changes then.
    """

    def __init__(
        self,
        declared: Sequence[TenantConfig],
        *,
        store: TenantStore,
        snapshot_file: Path | None,
        check: Callable[[TenantConfig], object],
        on_change: Callable[[Sequence[TenantConfig]], None],
    ) -> None:
        self.store = store
        self.check = check
        self.stored: StoredDirectory | None = None
        self.current = TenantDirectory(declared)
        self.num_restored = 0
        self._servable: StoredDirectory | None = None
        self._declared = tuple(declared)
        self._snapshot_file = snapshot_file
        self._num_gateways = 1
        self._on_change = on_change
        self._following = asyncio.Lock()
        on_change(self.current.tenants)

    async def start(self) -> int:
        """Take what the last run knew; return how many gateways there were then."""
        if self._snapshot_file is not None:
            snapshot = await asyncio.to_thread(load_snapshot, self._snapshot_file)
            self._num_gateways = snapshot.num_gateways
            if snapshot.directory is not None:
                self._adopt(snapshot.directory)
        return self._num_gateways

    async def catch_up(self) -> None:
        """Ask the store whether anything has changed; a store that is away changes nothing."""
        try:
            await self.follow(await self.store.mark())
        except DependencyError as error:
            log.warning("tenants not followed: %s", error)

    async def follow(self, mark: str | None) -> None:
        """Take over what the store holds, if its mark is not that of what is known here."""
        if mark is None or mark == self._mark:
            return
        async with self._following:
            if mark == self._mark:
                return
            try:
                await self._load()
            except DependencyError as error:
                log.warning("tenants not followed: %s", error)

    def declare(self, declared: Sequence[TenantConfig]) -> None:
        """Replace the declared tenants; raises ConfigError, and changes nothing, when wrong."""
        directory = TenantDirectory(declared, self._servable)
        self._on_change(directory.tenants)
        self._declared, self.current = tuple(declared), directory

    async def begin(self) -> StoredDirectory:
        """Return the stored directory to change, begun now if there was none."""
        await self.catch_up()
        if self.stored is None:
            await self.store.restore(StoredDirectory(generation=secrets.token_hex(8), version=0))
            await self._load()
        assert self.stored is not None, "restore either began a directory or found one"
        return self.stored

    async def note_gateways(self, number: int) -> None:
        """Remember how many gateways share the limits, for a start without the store."""
        if number != self._num_gateways:
            self._num_gateways = number
            await self._save()

    @property
    def _mark(self) -> str:
        return "" if self.stored is None else self.stored.mark

    async def _load(self) -> None:
        found, held = await self.store.load(), self.stored
        if held is not None and _is_behind(found, held):
            log.error(
                "the state store came back %s: tenants and keys are restored from this gateway",
                "empty" if found is None else f"at version {found.version}, not {held.version}",
            )
            self.num_restored += await self.store.restore(held)
            found = await self.store.load()
        if found is not None and found != held:
            self._adopt(found)
            await self._save()

    def _adopt(self, stored: StoredDirectory) -> None:
        """Take a stored directory; tenants of it that cannot be served are left out, and logged."""
        servable = []
        for tenant in stored.tenants:
            try:
                self.check(tenant)
            except ConfigError as error:
                log.error("tenant=%s cannot be served: %s", tenant.name, error)
            else:
                servable.append(tenant)
        self._servable = msgspec.structs.replace(stored, tenants=tuple(servable))
        directory = TenantDirectory(self._declared, self._servable)
        self._on_change(directory.tenants)
        self.stored, self.current = stored, directory

    async def _save(self) -> None:
        if self._snapshot_file is not None:
            snapshot = Snapshot(directory=self.stored, num_gateways=self._num_gateways)
            await asyncio.to_thread(save_snapshot, self._snapshot_file, snapshot)


def _is_behind(found: StoredDirectory | None, held: StoredDirectory) -> bool:
    """Whether a store has lost something: it is empty, or at an older version of the same."""
    if found is None:
        return True
    return found.generation == held.generation and found.version < held.version

"""Who a key belongs to, and what its tenant may do.

Keys are known by their SHA-256 only. It knows no HTTP: the caller hands over the key that it
found, and turns the answer into a status.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.frontend.errors import RequestError
from kvindex.foundation.errors import ConfigError
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.limits import Scope
from router.tenancy.stored import StoredDirectory

log = logging.getLogger("prefixfleet.router.tenancy")

ANONYMOUS_DEFAULT = TenantConfig(name="default", anonymous=True, isolation="shared")
"""The only tenant of a gateway that was given none."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant of a request, and the key that proved it (None when anonymous).

    `sent_hash` is that of the key that was sent, None without one: where nobody has a key, it is
    not looked at, and yet it may count a moment later. `by_operator`: no client sent anything, an
    operator acts as the tenant. `scopes` are those whose limits hold: the tenant, and the key if it
    has limits of its own.
    """

    tenant: TenantConfig
    key: TenantKey | None = None
    sent_hash: str | None = None
    by_operator: bool = False
    scopes: tuple[Scope, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scopes", _scopes_of(self.tenant, self.key))

    @property
    def key_alias(self) -> str:
        """What the key is called in logs and bills; "" when anonymous or without an alias."""
        return self.key.alias if self.key is not None else ""

    def model_of(self, name: str) -> str | None:
        """Return the model that a name means to this key, None when it may not use it."""
        if self.key is not None and self.key.models is not None and name not in self.key.models:
            return None
        target = self.tenant.aliases.get(name)
        if target is not None:
            return target
        allowed = self.tenant.models
        return name if allowed is None or name in allowed else None

    def usable(self, served: Iterable[str]) -> dict[str, str]:
        """Return every name that this key may use, with the served model behind it."""
        models = set(served)
        names = models | set(self.tenant.aliases)
        found = {name: self.model_of(name) for name in sorted(names)}
        return {name: model for name, model in found.items() if model in models}


def _scopes_of(tenant: TenantConfig, key: TenantKey | None) -> tuple[Scope, ...]:
    of_tenant = Scope(f"tenant/{tenant.name}", tenant.limits)
    if key is None or key.limits == Limits():
        return (of_tenant,)
    return (of_tenant, Scope(f"key/{key.hash}", key.limits))


class TenantDirectory:
    """All tenants and keys at one moment; immutable, so a change is a swap.

    `declared` are those of the configuration, `stored` what the admin API has made. Where they
    contradict each other the configuration wins, and the log says so.
    """

    def __init__(
        self, declared: Sequence[TenantConfig], stored: StoredDirectory | None = None
    ) -> None:
        """Index the keys; raise ConfigError for a name, key or anonymous tenant declared twice."""
        self.declared = {tenant.name: tenant for tenant in declared}
        self._by_hash: dict[str, tuple[str, TenantKey]] = {}
        self._by_name: dict[str, TenantConfig] = {}
        self._identities: dict[str, Identity] = {}
        self._anonymous: TenantConfig | None = None
        for tenant in declared:
            self._declare(tenant)
        if stored is not None:
            self._add_stored(stored)
        if not self._by_name:
            self._declare(ANONYMOUS_DEFAULT)

    @property
    def tenants(self) -> tuple[TenantConfig, ...]:
        """All tenants, the declared ones first."""
        return tuple(self._by_name.values())

    def tenant(self, name: str) -> TenantConfig | None:
        """Return the tenant of a name."""
        return self._by_name.get(name)

    def holds(self, hashed: str) -> bool:
        """Whether some tenant has this key."""
        return hashed in self._by_hash

    def identify(self, key: str | None, *, now: float) -> Identity:
        """Return whose key it is; raise RequestError `unauthorized` with the reason.

        The look-up goes by the key's hash, so its timing tells nothing about other keys. A wrong
        key is refused even where an anonymous tenant exists: whoever sends a key means it, except
        when no tenant has one at all, as stock OpenAI clients always send something.
        """
        return self._identify(None if key is None else hash_key(key), now)

    def identify_again(self, identity: Identity, *, now: float) -> Identity:
        """Return what an identity of an earlier directory is now; raises like `identify`."""
        if identity.by_operator:
            return self.act_as(identity.tenant.name)
        return self._identify(identity.sent_hash, now)

    def act_as(self, name: str) -> Identity:
        """Return the identity of an operator who acts as a tenant; raises like `identify`."""
        tenant = self._by_name.get(name)
        if tenant is None or tenant.blocked:
            raise RequestError("unauthorized", f"there is no tenant {name!r}, or it is blocked")
        return Identity(tenant, by_operator=True)

    def _identify(self, hashed: str | None, now: float) -> Identity:
        if hashed is None or (not self._by_hash and self._anonymous is not None):
            return self._identify_nobody(hashed)
        found = self._by_hash.get(hashed)
        if found is None:
            raise RequestError("unauthorized", "this API key is not known here")
        tenant, key = self._by_name[found[0]], found[1]
        if key.blocked:
            raise RequestError("unauthorized", "this API key is blocked")
        if tenant.blocked:
            raise RequestError("unauthorized", "the tenant of this API key is blocked")
        if key.expires_at is not None and now >= key.expires_at:
            raise RequestError("unauthorized", "this API key has expired")
        known = self._identities.get(hashed)
        if known is None:
            known = self._identities[hashed] = Identity(tenant, key, hashed)
        return known

    def _identify_nobody(self, hashed: str | None) -> Identity:
        if self._anonymous is None or self._anonymous.blocked:
            raise RequestError(
                "unauthorized", "no API key was given; send it as `Authorization: Bearer sk-...`"
            )
        return Identity(self._anonymous, None, hashed)

    def _declare(self, tenant: TenantConfig) -> None:
        if tenant.name in self._by_name:
            raise ConfigError(f"tenants: the name {tenant.name!r} is used twice")
        self._by_name[tenant.name] = tenant
        if tenant.anonymous:
            if self._anonymous is not None:
                raise ConfigError(
                    f"tenants: {self._anonymous.name!r} and {tenant.name!r} are both anonymous; "
                    "at most one may be"
                )
            self._anonymous = tenant
        for key in tenant.keys:
            holder = self._by_hash.get(key.hash)
            if holder is not None:
                raise ConfigError(
                    f"tenants: {holder[0]!r} and {tenant.name!r} hold the same key "
                    f"({key.alias or key.hash[:8]})"
                )
            self._by_hash[key.hash] = (tenant.name, key)

    def _add_stored(self, stored: StoredDirectory) -> None:
        for tenant in stored.tenants:
            if tenant.name in self._by_name:
                log.warning("tenant=%s is declared too: the stored one is ignored", tenant.name)
            else:
                self._by_name[tenant.name] = tenant
        for entry in stored.keys:
            if entry.tenant not in self._by_name:
                log.warning("key=%s belongs to no tenant: %s", entry.key.hash[:8], entry.tenant)
            elif entry.key.hash not in self._by_hash:
                self._by_hash[entry.key.hash] = (entry.tenant, entry.key)


def hash_key(key: str) -> str:
    """Return the form in which a key is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

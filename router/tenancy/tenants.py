"""Who a key belongs to, and what its tenant may do.

Keys are known by their SHA-256 only. It knows no HTTP: the caller hands over the key that it
found, and turns the answer into a status.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from engine.frontend.errors import RequestError
from kvindex.foundation.errors import ConfigError
from router.config import RouterConfig, TenantConfig, TenantKey
from router.policy.registry import build_policy
from router.policy.types import Policy

ANONYMOUS_DEFAULT = TenantConfig(name="default", anonymous=True, isolation="shared")
"""The only tenant of a gateway that was given none."""


class Identity(msgspec.Struct, frozen=True):
    """The tenant of a request, and the alias of the key that proved it ("" when anonymous)."""

    tenant: TenantConfig
    key_alias: str


class TenantDirectory:
    """All tenants and keys of one configuration; immutable, so a reload is a swap."""

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        """Index the keys; raise ConfigError for a name, key or anonymous tenant given twice."""
        self.tenants: tuple[TenantConfig, ...] = tuple(tenants) or (ANONYMOUS_DEFAULT,)
        self._by_hash: dict[str, tuple[TenantConfig, TenantKey]] = {}
        self._anonymous: TenantConfig | None = None
        names: set[str] = set()
        for tenant in self.tenants:
            if tenant.name in names:
                raise ConfigError(f"tenants: the name {tenant.name!r} is used twice")
            names.add(tenant.name)
            if tenant.anonymous:
                self._set_anonymous(tenant)
            for key in tenant.keys:
                self._add_key(tenant, key)

    def _set_anonymous(self, tenant: TenantConfig) -> None:
        if self._anonymous is not None:
            raise ConfigError(
                f"tenants: {self._anonymous.name!r} and {tenant.name!r} are both anonymous; "
                "at most one may be"
            )
        self._anonymous = tenant

    def _add_key(self, tenant: TenantConfig, key: TenantKey) -> None:
        holder = self._by_hash.get(key.hash)
        if holder is not None:
            raise ConfigError(
                f"tenants: {holder[0].name!r} and {tenant.name!r} hold the same key "
                f"({key.alias or key.hash[:8]})"
            )
        self._by_hash[key.hash] = (tenant, key)

    def identify(self, key: str | None, *, now: float) -> Identity:
        """Return whose key it is; raise RequestError `unauthorized` with the reason.

        The look-up goes by the key's hash, so its timing tells nothing about other keys. A wrong
        key is refused even where an anonymous tenant exists: whoever sends a key means it, except
        when no tenant has one at all, as stock OpenAI clients always send something.
        """
        if key is None or not self._by_hash:
            if self._anonymous is not None:
                return Identity(self._anonymous, "")
            raise RequestError(
                "unauthorized", "no API key was given; send it as `Authorization: Bearer sk-...`"
            )
        found = self._by_hash.get(hash_key(key))
        if found is None:
            raise RequestError("unauthorized", "this API key is not known here")
        tenant, entry = found
        if entry.blocked:
            raise RequestError("unauthorized", "this API key is blocked")
        if entry.expires_at is not None and now >= entry.expires_at:
            raise RequestError("unauthorized", "this API key has expired")
        return Identity(tenant, entry.alias)


def hash_key(key: str) -> str:
    """Return the form in which a key is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def may_use(tenant: TenantConfig, model: str) -> bool:
    """Say whether the tenant's allow-list lets it use a model."""
    return tenant.models is None or model in tenant.models


def build_policies(tenants: Sequence[TenantConfig], config: RouterConfig) -> Mapping[str, Policy]:
    """Make the policy of every tenant; raise ConfigError naming the tenant."""
    policies: dict[str, Policy] = {}
    for tenant in tenants:
        name = tenant.policy or config.default_policy
        params = tenant.policy_params if tenant.policy else config.default_policy_params
        if tenant.policy is None and tenant.policy_params:
            raise ConfigError(f"tenants.{tenant.name}: policy_params need `policy`, whose they are")
        policies[tenant.name] = build_policy(name, params, owner=f"tenants.{tenant.name}")
    return policies

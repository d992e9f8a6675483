"""Which policy places the requests of which tenant.

A tenant keeps its policy object, and what that has learned, for as long as name and parameters stay
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvindex.foundation.errors import ConfigError
from router.config import TenantConfig
from router.policy.planner import Planner
from router.policy.registry import build_policy
from router.policy.types import Policy

PolicyChoice = tuple[str, Mapping[str, float]]
"""A policy's name and its parameters."""


def policy_of(tenant: TenantConfig, default: PolicyChoice) -> PolicyChoice:
    """Return what a tenant asks for, else the default."""
    return default if tenant.policy is None else (tenant.policy, tenant.policy_params)


class TenantPolicies:
    """Binds tenants to policies in the planner; `default` is for those that name none."""

    def __init__(self, planner: Planner, default: PolicyChoice) -> None:
        self.default = default
        self._planner = planner
        self._bound: dict[str, PolicyChoice] = {}

    def check(self, tenant: TenantConfig) -> Policy:
        """Make the policy of a tenant; raise ConfigError naming the tenant."""
        if tenant.policy is None and tenant.policy_params:
            raise ConfigError(f"tenants.{tenant.name}: policy_params need `policy`, whose they are")
        name, params = self._choice(tenant)
        return build_policy(name, params, owner=f"tenants.{tenant.name}")

    def use(self, tenants: Sequence[TenantConfig]) -> None:
        """Bind all tenants; raises ConfigError, and binds none, when one is wrong."""
        changed = [t for t in tenants if self._bound.get(t.name) != self._choice(t)]
        policies = {tenant.name: self.check(tenant) for tenant in changed}
        self._planner.use_policies(policies)
        self._bound |= {tenant.name: self._choice(tenant) for tenant in changed}

    def _choice(self, tenant: TenantConfig) -> PolicyChoice:
        return policy_of(tenant, self.default)

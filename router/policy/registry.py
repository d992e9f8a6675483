"""Policy name -> policy, with its parameters validated.

Adding a policy is one line here; the planner never tests for a name.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvindex.foundation.errors import ConfigError
from router.policy.least_load import LeastLoad
from router.policy.prefix_cost import PrefixCost
from router.policy.round_robin import RoundRobin
from router.policy.types import Policy

POLICIES: dict[str, type[PrefixCost] | type[LeastLoad] | type[RoundRobin]] = {
    policy.name: policy for policy in (PrefixCost, LeastLoad, RoundRobin)
}


def build_policy(name: str, params: Mapping[str, float], *, owner: str) -> Policy:
    """Make a policy; raise ConfigError naming `owner` and what is allowed."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"{owner}: no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    try:
        return msgspec.convert(dict(params), type=policy)
    except msgspec.ValidationError as error:
        allowed = ", ".join(policy.__struct_fields__) or "none"
        raise ConfigError(
            f"{owner}: parameters of policy {name}: {error}; it takes: {allowed}"
        ) from None

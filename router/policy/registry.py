"""Policy name -> policy, with its parameters validated.

Adding a policy is one line here; the planner never tests for a name.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvindex.foundation.errors import ConfigError
from router.policy.least_load import LeastLoad
from router.policy.longest_prefix import LongestPrefix
from router.policy.power_of_two import PowerOfTwo
from router.policy.prefix_cost import PrefixCost
from router.policy.round_robin import RoundRobin
from router.policy.session import Session
from router.policy.types import Policy

PolicyType = (
    type[LeastLoad]
    | type[LongestPrefix]
    | type[PowerOfTwo]
    | type[PrefixCost]
    | type[RoundRobin]
    | type[Session]
)

POLICIES: dict[str, PolicyType] = {
    "least_load": LeastLoad,
    "longest_prefix": LongestPrefix,
    "power_of_two": PowerOfTwo,
    "prefix_cost": PrefixCost,
    "round_robin": RoundRobin,
    "session": Session,
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

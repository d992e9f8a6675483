"""Short forms for planner tests: views, requests, and a planner of one tenant."""

from __future__ import annotations

from typing import Any

from kvindex.index import Target
from router.policy.planner import Planner, PlannerConfig
from router.policy.registry import build_policy
from router.policy.types import Decision, Place, PlanRequest, TargetView

RATE = 1000.0


def planner(policy: str = "prefix_cost", *, gateway: str = "gw", **params: float) -> Planner:
    """Return a planner whose tenant `t` has this policy."""
    policies = {"t": build_policy(policy, params, owner="test")}
    return Planner(policies, config=PlannerConfig(max_queue_s=60.0), gateway=gateway)


def view(name: str, **fields: Any) -> TargetView:
    """Return an idle, live, EXACT target that prefills 1000 tokens a second."""
    known: dict[str, Any] = {
        "target": Target(name),
        "mode": "EXACT",
        "prefill_tokens_per_s": RATE,
    }
    return TargetView(**(known | fields))


def views(*names: str, **fields: Any) -> list[TargetView]:
    """Return equal targets of these names."""
    return [view(name, **fields) for name in names]


def ask(request_id: str = "q", num_tokens: int = 161, **fields: Any) -> PlanRequest:
    """Return a request with a chain of 16-token blocks, its own unless `hashes` are given."""
    own = tuple(f"{request_id}:{i}".encode() for i in range(num_tokens // 16))
    known: dict[str, Any] = {
        "request_id": request_id,
        "tenant": "t",
        "model": "m",
        "num_prompt_tokens": num_tokens,
        "num_total_tokens": num_tokens + 16,
        "block_size": 16,
        "hashes": own,
    }
    return PlanRequest(**(known | fields))


def winner(decision: Decision) -> str:
    """Return the chosen replica; fails when nothing was placed."""
    assert isinstance(decision, Place), decision
    return decision.winner.target.replica

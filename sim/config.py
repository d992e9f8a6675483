"""What one replay is: fleet, router, traffic and clock, as plain validated values.

It knows neither flags (replay_flags.py) nor how anything is simulated.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engine.config import EngineConfig
from router.config import Limits
from router.policy.planner import PlannerConfig
from router.policy.queueing import QueueConfig
from router.policy.replication import ReplicationConfig

Mode = Literal["order", "open", "closed", "fixed"]
"""`order`: no clock. `open`: requests come when the trace says. `closed`: a turn comes after the
answer to the turn before. `fixed`: so many requests are always in flight."""

Isolation = Literal["recorded", "shared", "tenant", "session"]
"""Who may find whose blocks; `recorded`: the groups and client salts of the trace."""

ViewKind = Literal["events", "history"]
"""What a gateway knows of the caches: the replicas' KV events, or its own placements only."""

GATEWAY_GUARDS = PlannerConfig(
    max_siblings=64,
    queue=QueueConfig(),
    replication=ReplicationConfig(),
)
"""What a gateway has unless it is told otherwise; a test holds it to `RouterConfig`."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ViewConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a gateway sees the caches.

    Events arrive `delay_s` late, and each batch is lost with probability `loss`; the gap is seen
    at the next batch and repaired from a snapshot. `own`: every gateway follows the events by
    itself, instead of all sharing one index.
    """

    kind: ViewKind = "events"
    delay_s: NonNegative = 0.0
    loss: Share = 0.0
    own: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica dies at `at_s` (seconds of the replay) and is back, empty, `down_s` later."""

    replica: Annotated[int, msgspec.Meta(ge=0)]
    at_s: NonNegative
    down_s: Positive


class TenantTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one tenant's traffic differs from the recording.

    `scale` 2 is twice as much: whole sessions again, under block ids of their own; below 1,
    sessions are left out. `weight` and `priority` are those of the engines' queues; `policy`
    None is the replay's, `params` are its own. `limits` hold as in a gateway: what exceeds them is
    refused with 429.
    """

    scale: NonNegative = 1.0
    weight: Positive = 1.0
    priority: int | None = None
    policy: str | None = None
    params: dict[str, float] = {}
    limits: Limits = Limits()


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replay; sizes in blocks of the engine, times in seconds.

    `block_size` None takes the trace's. `in_flight`: in `fixed` mode the requests in flight; in
    `order` mode a request counts as running at its replica until so many others were placed
    (None: one per replica). `window` cuts the trace by its own time. `warm_up` is the leading
    share of requests that fill the caches and are not counted. `jitter` spreads the requests of
    one clock tick over the tick. `planner` holds the guards of our policies, baselines have none.
    `step_by_step` plans each decode step by itself: slower, and the same (fast_forward.py).
    """

    policy: str = "prefix_cost"
    params: dict[str, float] = {}
    replicas: Count = 4
    blocks: Count = 4096
    block_size: Count | None = None
    mode: Mode = "order"
    in_flight: Count | None = None
    speed_up: Positive = 1.0
    jitter: bool = False
    window: tuple[float, float] | None = None
    warm_up: Share = 0.0
    isolation: Isolation = "recorded"
    tenants: dict[str, TenantTraffic] = {}
    gateways: Count = 1
    view: ViewConfig = ViewConfig()
    failures: tuple[Failure, ...] = ()
    latency: str = "h100-8b"
    planner: PlannerConfig = PlannerConfig()
    engine: EngineConfig = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    step_by_step: bool = False
    seed: int = 0

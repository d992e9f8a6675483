"""Builds the gateways of a replay: router and view by configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from kvindex.index import Target
from router.policy.planner import Planner
from router.policy.registry import POLICIES, build_policy
from router.policy.types import Policy
from sim.baselines.registry import build_baseline
from sim.config import ReplayConfig
from sim.event_feed import EventFeed
from sim.gateway import Gateway
from sim.placement import Observer, Router
from sim.router_view import HistoryView, IndexView, RouterView
from sim.routers import BaselineRouter, PlannedRouter, PolicyTable

RouterMaker = Callable[[str], Router]


def targets_of(config: ReplayConfig) -> list[Target]:
    """Return the targets of the fleet, `replica-0` first."""
    return [Target(f"replica-{i}") for i in range(config.replicas)]


def build_router(config: ReplayConfig, *, gateway: str) -> Router:
    """Make the router of one gateway; raise ConfigError for a policy that does not exist."""
    if config.policy not in POLICIES:
        for name, traffic in config.tenants.items():
            if traffic.policy is not None:
                raise ConfigError(
                    f"tenant {name}: a policy of its own needs the planner, and {config.policy} "
                    f"has none; --policy may be one of {', '.join(sorted(POLICIES))}"
                )
        return BaselineRouter(build_baseline(config.policy, config.params))
    default = build_policy(config.policy, config.params, owner="replay")
    own: dict[str, Policy] = {
        name: build_policy(traffic.policy, traffic.params, owner=f"tenant {name}")
        for name, traffic in config.tenants.items()
        if traffic.policy is not None
    }
    table = PolicyTable(default, own)
    return PlannedRouter(Planner(table, config=config.planner, gateway=gateway))


def build_gateways(
    config: ReplayConfig,
    *,
    clock: Clock,
    block_size: int,
    max_model_len: int | None,
    observer: Observer | None,
    make_router: RouterMaker | None = None,
) -> tuple[list[Gateway], list[EventFeed]]:
    """Make every gateway; return them and the feeds that want the replicas' events.

    `make_router` gives a gateway of this name its router, None for that of the configuration.
    """
    feeds: list[EventFeed] = []
    gateways = []
    make = _view_maker(config, clock, feeds, max_model_len)
    for i in range(config.gateways):
        name = f"gateway-{i}"
        router = make_router(name) if make_router else build_router(config, gateway=name)
        view = make()
        # Baselines tell nobody what they have running, and a reservation needs a clock to end.
        reserves = not isinstance(router, BaselineRouter) and config.mode != "order"
        index = view.index if isinstance(view, IndexView) and reserves else None
        gateways.append(Gateway(name, router, view, block_size, index, observer))
    return gateways, feeds


def _view_maker(
    config: ReplayConfig, clock: Clock, feeds: list[EventFeed], max_model_len: int | None
) -> Callable[[], RouterView]:
    targets: Sequence[Target] = targets_of(config)

    def index() -> IndexView:
        if not feeds or config.view.own:
            view = IndexView(clock, max_model_len=max_model_len)
            source = random.Random(f"{config.seed} events {len(feeds)}")
            feeds.append(EventFeed(view, config.view.delay_s, config.view.loss, source))
        return feeds[-1].view

    def history() -> HistoryView:
        return HistoryView(targets, blocks=config.blocks, max_model_len=max_model_len)

    return history if config.view.kind == "history" else index

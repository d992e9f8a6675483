"""One validation from a trace and a live fleet to a report: reset, drive, replay, compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from kvindex.foundation.errors import ConfigError, PrefixFleetError
from kvindex.index import Target
from sim.config import ReplayConfig
from sim.latency import load_latency
from sim.live.client import LiveClient
from sim.live.compare import Comparison, Tolerance, compare
from sim.live.drive import Driven, Driver, empty_caches
from sim.live.fleet_settings import FleetSettings
from sim.live.prompts import PromptMaker
from sim.live.twin import replay_driven, targets_weighed
from sim.traces.row import TraceHeader, TraceRow


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to validate; `model` and `blocks` None: what the fleet says."""

    open_loop: bool = False
    speed_up: float = 1.0
    vocab_size: int
    latency: str
    model: str | None = None
    blocks: int | None = None
    tolerance: Tolerance


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The report: what was replayed with which settings, and how it compares.

    `num_too_long` rows were not sent: no replica has room for them.
    """

    trace: str
    model: str
    mode: str
    policy: str
    params: dict[str, float]
    replicas: tuple[str, ...]
    blocks: int
    block_size: int
    latency: str
    num_too_long: int
    tolerance: Tolerance
    comparison: Comparison


class _Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the fleet before anything is sent; None is unknown."""

    gateway: str
    replicas: list[str]
    blocks: int
    max_model_len: int | None = None


async def validate(
    client: LiveClient,
    header: TraceHeader,
    rows: Sequence[TraceRow],
    settings: FleetSettings,
    plan: Plan,
    *,
    trace: str,
    done: Callable[[], None],
) -> Validation:
    """Send the rows to the fleet, replay them, compare.

    Raises ConfigError when it is not known what to replay, PrefixFleetError or DependencyError
    when the fleet does not answer.
    """
    model = plan.model or await client.only_model()
    fleet = await _prepare(client, settings, plan, model)
    longest = min(fleet.blocks * settings.engine.block_size, fleet.max_model_len or math.inf)
    sent = [row for row in rows if row.input_length + row.output_length <= longest]
    prompts = PromptMaker(header, vocab_size=plan.vocab_size)
    driver = Driver(client, prompts, model=model, done=done)
    driven = await (
        driver.by_the_clock(sent, speed_up=plan.speed_up)
        if plan.open_loop
        else driver.one_by_one(sent)
    )
    targets = targets_weighed(driven) or [Target(replica) for replica in fleet.replicas]
    config = replay_config(settings, plan, driven, replicas=len(targets), blocks=fleet.blocks)
    twin = replay_driven(header, driven, config, gateway=fleet.gateway, targets=targets)
    outside_s = load_latency(plan.latency).outside_s
    return Validation(
        trace=trace,
        model=model,
        mode="open loop" if plan.open_loop else "one by one",
        policy=config.policy,
        params=config.params,
        replicas=twin.replicas,
        blocks=fleet.blocks,
        block_size=settings.engine.block_size,
        latency=plan.latency,
        num_too_long=len(rows) - len(sent),
        tolerance=plan.tolerance,
        comparison=compare(twin, plan.tolerance, outside_s=outside_s),
    )


def replay_config(
    settings: FleetSettings,
    plan: Plan,
    driven: Sequence[Driven],
    *,
    replicas: int,
    blocks: int,
) -> ReplayConfig:
    """Configure the replay as the fleet is; its policy is the one that decided, if that is known.

    One key sends everything, so all share what is cached.
    """
    placed = next((one.placed for one in driven if one.placed is not None), None)
    return ReplayConfig(
        policy=placed.policy if placed is not None else settings.policy,
        params=placed.params if placed is not None else settings.params,
        replicas=replicas,
        blocks=blocks,
        block_size=settings.engine.block_size,
        mode="open" if plan.open_loop else "fixed",
        in_flight=None if plan.open_loop else 1,
        isolation="shared",
        latency=plan.latency,
        planner=settings.planner,
        engine=settings.engine,
    )


async def _prepare(client: LiveClient, settings: FleetSettings, plan: Plan, model: str) -> _Fleet:
    """Empty the caches and ask the gateway what it has; without an admin API, believe the file."""
    blocks = plan.blocks or settings.blocks
    if not client.has_admin:
        if blocks is None:
            raise ConfigError("--blocks: how many has a replica? (without an admin API)")
        names = [f"replica-{i}" for i in range(settings.replicas)]
        return _Fleet(gateway="gateway-0", replicas=names, blocks=blocks)
    replicas = await empty_caches(client, model)
    sizes = {replica.max_blocks for replica in replicas}
    if len(sizes) != 1:
        raise PrefixFleetError("the replicas differ in size; a replay has equal ones only")
    blocks = plan.blocks or sizes.pop() or blocks
    if blocks is None:
        raise ConfigError("--blocks: how many has a replica? (the gateway does not know)")
    return _Fleet(
        gateway=(await client.fleet()).gateway,
        replicas=[replica.id for replica in replicas],
        blocks=blocks,
        max_model_len=min((r.max_model_len for r in replicas if r.max_model_len), default=None),
    )

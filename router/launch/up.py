"""`prefixfleet up`: from flags to a running fleet, and what it tells the person who started it.

It prepares what must be there before the first process (ports, secrets, model) and reports every
obstacle in one line; running the fleet is fleet.py's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_loader import LoadedConfig
from router.config import ConfigSource, RouterConfig, TenantConfig
from router.launch import embedded_redis
from router.launch.banner import ready_text
from router.launch.children import gateway_names, url_of
from router.launch.config import FleetConfig, config_source, load_fleet_config
from router.launch.fleet import Fleet
from router.launch.fleet_file import (
    FleetFile,
    GatewayEntry,
    RedisEntry,
    ReplicaEntry,
    TlsEntry,
    read_fleet_file,
)
from router.launch.model_folder import chosen_model
from router.launch.plan import FleetPlan, make_plan, settle_router
from router.launch.port_flags import add_ports
from router.launch.progress import Progress
from router.launch.ray_plan import look_at_cluster, settle_on_ray
from router.launch.run_dir import RunDirectory
from router.launch.secrets import load_or_create_secrets, provide_keys
from router.launch.shadowing import require_own_packages
from router.tls import load_certificate


def up(invocation: Invocation) -> int:
    """Start a fleet and keep it running until a signal; return the exit code."""
    flags = _read_flags(invocation)
    config = load_fleet_config(invocation.config_file, flags, demo=True)
    progress = Progress()
    if config.section("fleet", FleetConfig).launcher == "ray":
        progress.say("Ray cluster …")
        flags |= settle_on_ray(config, look_at_cluster(), say=progress.say)
        config = load_fleet_config(invocation.config_file, flags, demo=True)
    source = config_source(invocation.config_file, flags, demo=True)
    require_own_packages()
    run_dir = RunDirectory(Path(config.section("fleet", FleetConfig).run_dir))
    run_dir.create()
    run_dir.lock()
    try:
        with _keeping_keys(run_dir) as known_keys:
            return _run(config, source, run_dir, known_keys, progress=progress)
    finally:
        run_dir.unlock()


def _read_flags(invocation: Invocation) -> dict[str, object]:
    parser = CommandParser(invocation, "Start a fleet on this machine and keep it running.")
    add_ports(parser)
    parser.override(
        "--replicas", "fleet.replicas", type=int, metavar="N", help="how many share this machine"
    )
    parser.override(
        "--launcher", "fleet.launcher", metavar="NAME", help="where replicas run: local, or on ray"
    )
    parser.override(
        "--model", "worker.model", metavar="FOLDER", help="a Hugging Face folder, or `demo`"
    )
    parser.override(
        "--dtype", "worker.dtype", metavar="NAME", help="of weights: auto, float32 or bfloat16"
    )
    parser.override(
        "--redis", "redis.index_url", metavar="URL", help="a redis:// URL, or `embedded`"
    )
    parser.override(
        "--run-dir", "fleet.run_dir", metavar="DIR", help="where sockets, logs and secrets go"
    )
    parser.override(
        "--executor",
        "fleet.executor",
        metavar="NAME",
        help="`model`, or `scripted`: tokens without a model, for tests",
    )
    return parser.overrides(parser.read())


@contextmanager
def _keeping_keys(run_dir: RunDirectory) -> Iterator[dict[str, str]]:
    """Take the old fleet.json out of sight until the new one is written; yield its keys.

    Whoever waits for the file must not find that of the run before. If none is written, the old
    one comes back, because it holds the only clear copy of the keys.
    """
    old = read_fleet_file(run_dir)
    aside = run_dir.fleet_file.with_suffix(".json.old")
    if old is not None:
        run_dir.fleet_file.replace(aside)
    elif aside.exists():  # the run before was killed while it started
        aside.replace(run_dir.fleet_file)
        old = read_fleet_file(run_dir)
        run_dir.fleet_file.replace(aside)
    try:
        yield old.keys if old is not None else {}
    finally:
        if aside.exists() and not run_dir.fleet_file.exists():
            aside.replace(run_dir.fleet_file)
        aside.unlink(missing_ok=True)


def _run(
    config: LoadedConfig,
    source: ConfigSource,
    run_dir: RunDirectory,
    known_keys: dict[str, str],
    *,
    progress: Progress,
) -> int:
    run_dir.rotate_logs()
    secrets = load_or_create_secrets(run_dir)
    tenants, keys = provide_keys(config.entries("tenants", TenantConfig), known_keys)
    router = settle_router(config)
    if config.section("redis", RedisConfig).index_url == EMBEDDED:
        embedded_redis.find_server()  # better refused now than after the model is loaded
    progress.say(f"model {config.plain('worker')['model']} …")
    model = chosen_model(config, say=progress.say)
    progress.say(f"model is in {model.folder}")
    plan = make_plan(
        config,
        source=source,
        run_dir=run_dir,
        router=router,
        tenants=tenants,
        secrets=secrets,
        model=model,
    )
    file = _fleet_file(plan, run_dir=run_dir, keys=keys)

    async def serve() -> int:
        fleet = Fleet(
            plan,
            file,
            run_dir=run_dir,
            progress=progress,
            on_ready=lambda: progress.print(ready_text(file, progress.elapsed_s)),
        )
        return await fleet.run()

    return asyncio.run(serve())


def _fleet_file(plan: FleetPlan, *, run_dir: RunDirectory, keys: dict[str, str]) -> FleetFile:
    router, names = plan.gateway.router, [replica.replica_id for replica in plan.replicas]
    gateway = gateway_names(router)
    processes = [*gateway, *names] + ([embedded_redis.NAME] if plan.starts_redis else [])
    return FleetFile(
        url=url_of(router.host, router.port, tls=router.tls),
        admin_url=url_of(router.admin_host, router.admin_port, tls=router.tls),
        admin_key=plan.gateway.admin_key,
        keys=keys,
        model=plan.replicas[0].served_models[0],
        model_folder=plan.model.folder,
        dtype=plan.replicas[0].dtype,
        run_dir=str(run_dir.path),
        redis=RedisEntry(url=plan.redis.index_url, embedded=plan.starts_redis),
        replicas=[ReplicaEntry(id=r.replica_id, url=r.advertised_url) for r in plan.replicas],
        gateway=GatewayEntry(others=dict.fromkeys(gateway[1:])),
        logs={process: str(run_dir.log_file(process)) for process in processes},
        tls=_tls_entry(router),
        pid=os.getpid(),
    )


def _tls_entry(router: RouterConfig) -> TlsEntry | None:
    if router.tls is None:
        return None
    host = urlsplit(url_of(router.host, router.port)).hostname or ""
    name = load_certificate(router.tls).name_for(host)
    return TlsEntry(certificate=str(Path(router.tls.certificate).absolute()), name=name)

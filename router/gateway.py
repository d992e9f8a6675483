"""The gateway process: `python -P -m router.gateway --config-json FILE`.

Startup, serving and shutdown on one screen. With `router.processes` > 1 it is the parent of as many
like itself, each started with `--seat`. Exit codes: 0 drained, 1 a process cannot be kept up,
2 configuration, 3 a port or a dependency is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from aiohttp import web
from redis.asyncio import Redis

from kvindex.config import EMBEDDED
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.foundation.logs import setup_logging
from kvindex.memory_index import AsyncMemoryIndex, MemoryIndex
from kvindex.memory_registry import MemoryRegistry
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from router.app import build_admin_app, build_client_app
from router.assembly import Gateway, Stores
from router.config import GatewaySpec, load_spec
from router.file_limit import raise_file_limit
from router.launch.gateway_processes import (
    GatewayProcesses,
    check_processes,
)
from router.launch.gateway_seats import BACKLOG, port_taken
from router.launch.supervisor import ChildFailedError
from router.observe.access_log import write_together
from router.observe.shared_decisions import SharedDecisions
from router.retire import retire
from router.seat import Seat, read_seat
from router.tenancy.stores import TenancyStores, check_state_server, redis_stores
from router.tls import ListenerTls, load_certificate

log = logging.getLogger("prefixfleet.router")

EXIT_CONFIG = 2
EXIT_DEPENDENCY = 3
_CUT_OFF_TIMEOUT_S = 1.0
_FILES_PER_REQUEST = 2
_COLLECT_EVERY = 20_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(prog="router.gateway", description="Run one gateway.")
    parser.add_argument("--config-json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--seat", action="store_true", help="serve on a parent's listeners")
    arguments = parser.parse_args(argv)
    setup_logging("gateway")
    try:
        spec = load_spec(arguments.config_json)
        check_processes(spec)
        if arguments.seat:
            work = serve(spec, read_seat(sys.stdin.buffer.read()))
        elif spec.router.processes > 1:
            if spec.router.tls is not None:
                load_certificate(spec.router.tls)  # Else each process says what is wrong with it.
            work = GatewayProcesses(spec, arguments.config_json).run()
        else:
            work = serve(spec)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(work)
    except ChildFailedError as error:
        print(f"prefixfleet gateway: {error}", file=sys.stderr)
        return error.exit_code
    except ConfigError as error:
        print(f"prefixfleet gateway: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DependencyError as error:
        print(f"prefixfleet gateway: {error}", file=sys.stderr)
        return EXIT_DEPENDENCY
    return 0


async def serve(spec: GatewaySpec, seat: Seat | None = None) -> None:
    """Serve until a signal, then drain; with a `seat`, on the listeners that come with it.

    SIGUSR1 says that a successor has the seat: then drain without haste.

    Raises DependencyError when a port is taken, ConfigError when the spec makes no sense.
    """
    stop, leave = _end_on_signals()
    tls = ListenerTls(spec.router.tls) if spec.router.tls is not None else None
    clients, admins = (tls.clients, tls.admins) if tls is not None else (None, None)
    write_together(asyncio.get_running_loop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    config = spec.router
    raise_file_limit(_FILES_PER_REQUEST * config.max_in_flight)
    id = _gateway_id()
    # One client for each server: what is told to it in one turn of the event loop goes together.
    client_of = cache(partial(connect, config=spec.redis))
    gateway = Gateway(
        spec,
        id=id,
        clock=SystemClock(),
        stores=_stores(spec, client_of),
        tenancy_stores=await _tenancy_stores(spec, id, client_of),
        shared_decisions=_shared_decisions(spec, client_of),
        seat=seat,
    )
    client_runner, admin_runner = (
        web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CUT_OFF_TIMEOUT_S
        )
        for app in (build_client_app(gateway), build_admin_app(gateway))
    )
    try:
        await gateway.start()
        _reload_on_signal(gateway)
        if tls is not None:
            gateway.metrics.follow_certificate(tls.file, tls.expires_at)
            tls.start(every_s=config.poll_s)
        if seat is None:
            await _listen(client_runner, config.host, config.port, clients)
            await _listen(admin_runner, config.admin_host, config.admin_port, admins)
        else:
            await _take_seat(seat, (client_runner, clients), (admin_runner, admins))
        _collect_seldom()
        log.info(
            "gateway ready id=%s process=%d url=%s admin=%s replicas=%d mode=%s",
            gateway.id,
            seat.number if seat is not None else 0,
            _address(client_runner),
            _address(admin_runner),
            len(gateway.view.replicas),
            gateway.view.mode,
        )
        await leave.wait()
        if not stop.is_set():
            await retire(
                gateway.admission,
                (client_runner, admin_runner),
                stop=stop,
                linger_s=config.drain_timeout_s,
            )
        log.info("draining requests=%d", gateway.admission.num_admitted)
        num_left = await gateway.admission.drain(timeout_s=config.drain_timeout_s)
        if num_left:
            log.warning("cutting off requests=%d after_s=%g", num_left, config.drain_timeout_s)
    finally:
        if tls is not None:
            tls.close()
        await client_runner.cleanup()
        await admin_runner.cleanup()
        await gateway.close()


def _stores(spec: GatewaySpec, client_of: Callable[[str], Redis]) -> Stores | None:
    if spec.index_url is None:
        has_events = any(replica.events for replica in spec.router.replicas)
        return _private_stores() if has_events else None
    redis = client_of(spec.index_url)
    registry = RedisRegistry(redis, spec.fleet_secret.encode())
    return Stores(registry, lambda pool: RedisIndex(redis, pool))


def _private_stores() -> Stores:
    """Return an index in this process: enough for one gateway that bridges its engines itself."""
    indexes: dict[str, MemoryIndex] = {}
    return Stores(
        MemoryRegistry(),
        lambda pool: AsyncMemoryIndex(indexes.setdefault(pool, MemoryIndex())),
    )


async def _tenancy_stores(
    spec: GatewaySpec, id: str, client_of: Callable[[str], Redis]
) -> TenancyStores | None:
    """Return what must persist, in Redis, which is checked; None without one."""
    url = spec.redis.resolved_state_url
    if url == EMBEDDED:
        return None
    redis = client_of(url)
    await check_state_server(redis)
    return redis_stores(redis, gateway=id, clock=SystemClock())


def _shared_decisions(
    spec: GatewaySpec, client_of: Callable[[str], Redis]
) -> SharedDecisions | None:
    """Return the place where other gateways find this one's decisions; None without a Redis."""
    url = spec.index_url or spec.redis.resolved_state_url
    if url == EMBEDDED:
        return None
    return SharedDecisions(client_of(url), max_records=spec.router.max_decisions)


async def _listen(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    """Open a listener; raise DependencyError when the port is taken."""
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG, ssl_context=tls).start()
    except OSError as error:
        raise port_taken(host, port, error) from None


async def _take_seat(
    seat: Seat,
    clients: tuple[web.AppRunner, ssl.SSLContext | None],
    admins: tuple[web.AppRunner, ssl.SSLContext | None],
) -> None:
    """Serve on the parent's listeners; last, let the other processes ask what an admin may."""
    for runner, _ in (clients, admins):
        await runner.setup()
    for (runner, tls), fd in ((clients, seat.client_fd), (admins, seat.admin_fd)):
        if fd is not None:
            listener = socket.socket(fileno=fd)
            await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=tls).start()
    await web.UnixSite(admins[0], str(seat.socket_file)).start()


def _address(runner: web.AppRunner) -> str:
    """Return the URL of a listener, or the path of its socket."""
    site, address = next(iter(runner.sites)), runner.addresses[0]
    if isinstance(address, str):
        return address
    return f"{site.name.partition(':')[0]}://{address[0]}:{address[1]}"


def _gateway_id() -> str:
    """Return an id that no other gateway process has, in any container."""
    return f"gw-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _end_on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that SIGTERM and SIGINT set, and one that SIGUSR1 sets, too."""
    stop, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_soon() -> None:
        stop.set()
        leave.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_soon)
    loop.add_signal_handler(signal.SIGUSR1, leave.set)
    return stop, leave


def _reload_on_signal(gateway: Gateway) -> None:
    """Read the configuration again on SIGHUP."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: gateway.background.start(_reload(gateway)))


async def _reload(gateway: Gateway) -> None:
    await gateway.reload.reload()


def _collect_seldom() -> None:
    """Look for garbage seldom, and not in what was there before the first request.

    Nearly all that a request leaves is freed by its reference counts; looking at all of it every
    700 new objects would take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 10, 10)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Prefer uvloop, which is absent on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())

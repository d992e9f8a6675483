"""`prefixfleet index bridge`: bring one stock vLLM into a fleet's index, from a process of its own.

A gateway whose configuration gives a replica `events` does the same by itself; several of either
kind may run for one engine, and one of them works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket

from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.arguments import Invocation
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError
from kvindex.foundation.logs import setup_logging
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from router.config import StaticReplica
from router.fleet.bridge import EngineBridge
from router.fleet.bridge_assignment import AUTO
from router.fleet.client import ReplicaClient
from router.launch.index_location import IndexLocation, index_parser, locate

log = logging.getLogger("prefixfleet.router.bridge")

_CONNECT_TIMEOUT_S = 2.0


def bridge(invocation: Invocation) -> int:
    """Follow an engine until interrupted."""
    parser = index_parser(invocation, "Follow a vLLM's KV events into the index.")
    parser.add_argument("--engine", required=True, metavar="URL", help="the engine's API")
    parser.add_argument(
        "--events",
        default=AUTO,
        metavar="ENDPOINT",
        help=f"where it publishes, tcp://HOST:PORT; `{AUTO}` asks the engine",
    )
    parser.add_argument(
        "--replay",
        metavar="ENDPOINT",
        help="where it repeats events, tcp://HOST:PORT (default: ask the engine)",
    )
    parser.add_argument("--name", help="its id as a replica (default: host and port)")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="where tokenizer.json is (default: as the engine says)",
    )
    parser.add_argument(
        "--data-parallel-size", type=int, default=1, metavar="N", help="its engine cores"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="variable with the engine's key (default: no key)"
    )
    flags = parser.read()
    replica = _replica(flags)
    location = locate(invocation, parser, flags)
    setup_logging("bridge")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_follow(replica, location))
    return 0


def _replica(flags: argparse.Namespace) -> StaticReplica:
    api_key = None
    if flags.api_key_env is not None:
        api_key = os.environ.get(flags.api_key_env)
        if not api_key:
            raise ConfigError(f"--api-key-env: the variable {flags.api_key_env} is not set")
    if "://" not in flags.engine:
        raise ConfigError(f"--engine {flags.engine!r}: expected http://HOST:PORT")
    try:
        return StaticReplica(
            url=flags.engine,
            kind="vllm",
            name=flags.name,
            api_key=api_key,
            events=flags.events,
            replay=flags.replay,
            tokenizer=flags.tokenizer,
            data_parallel_size=flags.data_parallel_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


async def _follow(replica: StaticReplica, location: IndexLocation) -> None:
    client = ReplicaClient(connect_timeout_s=_CONNECT_TIMEOUT_S)
    secret = location.secrets.fleet_secret.encode()
    registry = RedisRegistry(connect(location.url, location.redis), secret)
    token = location.secrets.internal_token
    running = asyncio.create_task(
        EngineBridge(
            replica,
            client=client,
            registry=registry,
            open_index=lambda pool: RedisIndex(connect(location.url, location.redis), pool),
            clock=SystemClock(),
            owner=f"bridge-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            internal_headers={"authorization": f"Bearer {token}"} if token else {},
            on_bundle=_say_where_it_is_needed,
        ).run()
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    log.info("bridge started engine=%s index=%s", replica.base_url, location.shown_url)
    try:
        await running
    finally:
        client.close()
        await registry.close()


def _say_where_it_is_needed(bundle: TokenizerBundle) -> None:
    log.warning(
        "no replica of ours serves this model: gateways need its tokenizer too, so give them the "
        "engine in router.replicas with `tokenizer` set digest=%s",
        bundle.tokenizer_digest,
    )

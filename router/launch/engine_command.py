"""`prefixfleet engine MODEL`: one replica, on its own or in a fleet, under vLLM's flag names.

It prepares the model, then becomes the replica's front process; nothing of the launcher stays. A
flag that today's engine cannot honour is refused, with those that it can.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, NoReturn

import msgspec

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.arguments import Invocation
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import ConfigError
from router.launch.children import ReplicaSettings
from router.launch.config import load_fleet_config
from router.launch.engine_flags import engine_parser
from router.launch.model_folder import chosen_model
from router.launch.plan import replica_settings
from router.launch.ports import require_free
from router.launch.secrets import VARIABLES, shared_secrets


def engine(invocation: Invocation) -> NoReturn:
    """Serve one model until a signal; does not return."""
    parser = engine_parser(invocation)
    flags = parser.read()
    overrides = parser.overrides(flags)
    config = load_fleet_config(invocation.config_file, overrides)
    worker = config.plain("worker")
    require_free(worker["host"], worker["port"], flag="--port")
    joining = _joining(config, flags.join)
    model = chosen_model(config, say=_say)
    beside: dict[str, Any] = {"api_key": worker["api_key"], **joining}
    if flags.served_model_name:
        beside["served_models"] = tuple(flags.served_model_name)
    if flags.advertised_url:
        beside["advertised_url"] = flags.advertised_url
    settings = replica_settings(
        config,
        replica_id=flags.replica_id or f"{socket.gethostname()}-{worker['port']}",
        port=worker["port"],
        model=model,
        num_replicas=1,
        **beside,
    )
    _say(f"serving {', '.join(settings.served_models)} on {settings.advertised_url}/v1")
    _become_front(settings)


def _joining(config: LoadedConfig, joins: bool) -> dict[str, Any]:
    """Return what makes a replica register in a fleet; ConfigError without a Redis or secrets."""
    redis = config.section("redis", RedisConfig)
    if not joins:
        return {}
    if redis.index_url == EMBEDDED:
        raise ConfigError("--join needs the fleet's Redis: --redis URL, or redis.index_url")
    secrets = shared_secrets()
    if secrets is None:
        raise ConfigError(
            f"--join needs the fleet's secrets in {', '.join(VARIABLES.values())}; on the machine "
            "of `prefixfleet up` they are in its run directory, in secrets.json"
        )
    return {
        "index_url": redis.index_url,
        "redis": redis,
        "internal_token": secrets.internal_token,
        "fleet_secret": secrets.fleet_secret,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _become_front(settings: ReplicaSettings) -> NoReturn:
    """Replace this process by the front; its settings hold a key and go through a pipe."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        # A few hundred bytes: they fit into the pipe before anybody reads.
        stream.write(msgspec.json.encode(settings))
    os.dup2(reader, 0)
    argv = [sys.executable, "-P", "-m", "worker.server.main", "--config-json", "-"]
    os.execv(sys.executable, argv)

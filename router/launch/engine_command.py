"""`prefixfleet engine MODEL`: one replica, on its own or in a fleet, under vLLM's flag names.

It prepares the model, then becomes the replica's front process; nothing of the launcher stays. A
flag that today's engine cannot honour is refused, with those that it can.
"""

from __future__ import annotations

import os
import socket
import sys
from argparse import ArgumentTypeError
from typing import Any, NoReturn

import msgspec

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import ConfigError
from router.launch.children import ReplicaSettings
from router.launch.config import load_fleet_config
from router.launch.model_folder import chosen_model
from router.launch.plan import replica_settings
from router.launch.ports import require_free
from router.launch.secrets import VARIABLES, shared_secrets


def engine(invocation: Invocation) -> NoReturn:
    """Serve one model until a signal; does not return."""
    parser = _parser(invocation)
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


def _json_object(text: str) -> dict[str, Any]:
    """Read a flag whose value is a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ArgumentTypeError(f"expected a JSON object, not {text!r}") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser(invocation: Invocation) -> CommandParser:
    parser = CommandParser(invocation, "Serve one model alone, with vLLM's flag names.")
    parser.override(
        "model", "worker.model", nargs="?", help='"demo" or a Hugging Face folder', metavar="MODEL"
    )
    parser.add_argument(
        "--join", action="store_true", help="register in the fleet of --redis, with its secrets"
    )
    parser.override("--redis", "redis.index_url", help="the fleet's index")
    parser.add_argument("--replica-id", help="its name in the fleet (default: host and port)")
    parser.add_argument("--advertised-url", help="where gateways reach it (default: host and port)")
    parser.add_argument("--served-model-name", nargs="+", help="names that requests may use")
    for flag, setting, text in (
        ("--max-model-len", "engine.max_model_len", "longest prompt plus output, in tokens"),
        ("--max-num-seqs", "engine.max_num_seqs", "requests in one step"),
        ("--max-num-batched-tokens", "engine.max_num_batched_tokens", "tokens in one step"),
        ("--block-size", "engine.block_size", "tokens in a block"),
        ("--kv-cache-memory-bytes", "worker.kv_cache_memory_bytes", "memory of the KV cache"),
        ("--num-threads", "worker.num_threads", "threads that compute, 0 for all cores"),
        ("--port", "worker.port", "port of the API"),
        ("--data-parallel-size", "worker.data_parallel_size", "engine cores behind the API"),
        ("--tensor-parallel-size", "worker.tensor_parallel_size", "processes that share a model"),
    ):
        parser.override(flag, setting, type=int, help=text)
    for flag, setting, text in (
        ("--dtype", "worker.dtype", "auto, float32 or bfloat16"),
        ("--host", "worker.host", "address to listen on"),
        ("--distributed-executor-backend", "worker.distributed_executor_backend", "mp or ray"),
        ("--api-key", "worker.api_key", "key that requests must carry"),
        ("--step-log-dir", "worker.step_log_dir", "folder for recordings of every step"),
        ("--tool-call-parser", "worker.tool_call_parser", "hermes, mistral or llama3_json"),
        ("--reasoning-parser", "worker.reasoning_parser", "qwen3, deepseek_r1 or mistral"),
        ("--device", "worker.device", "auto, cpu or cuda"),
        (
            "--cuda-graph-mode",
            "worker.cuda_graph_mode",
            "none, piecewise, full, full_decode_only or full_and_piecewise",
        ),
    ):
        parser.override(flag, setting, help=text)
    parser.override(
        "--gpu-memory-utilization",
        "worker.gpu_memory_utilization",
        type=float,
        help="share of a GPU's memory that the engine may take",
    )
    parser.override(
        "--kv-events-config",
        "worker.kv_events",
        type=_json_object,
        metavar="JSON",
        help="KV events with tokens in them, for routers of other make",
    )
    caching = "engine.enable_prefix_caching"
    for flag, setting, text in (
        ("--enforce-eager", "worker.enforce_eager", "no CUDA graphs"),
        ("--runner-process", "worker.runner_process", "give the model a process of its own"),
        (
            "--deterministic",
            "worker.deterministic",
            "the same tokens alone and in any batch, in bfloat16 too",
        ),
        ("--enable-prefix-caching", caching, "the default"),
    ):
        parser.override(flag, setting, action="store_true", default=None, help=text)
    parser.override(
        "--no-enable-prefix-caching",
        caching,
        action="store_false",
        default=None,
        help="compute every prompt anew",
        dest="no_enable_prefix_caching",
    )
    return parser


def _become_front(settings: ReplicaSettings) -> NoReturn:
    """Replace this process by the front; its settings hold a key and go through a pipe."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        # A few hundred bytes: they fit into the pipe before anybody reads.
        stream.write(msgspec.json.encode(settings))
    os.dup2(reader, 0)
    argv = [sys.executable, "-P", "-m", "worker.server.main", "--config-json", "-"]
    os.execv(sys.executable, argv)

"""`prefixfleet engine MODEL`: one replica on its own, under the flag names that vLLM uses.

It prepares the model, then becomes the replica's front process; nothing of the launcher stays. A
flag that today's engine cannot honour is refused, with those that it can.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from router.launch.children import ReplicaSettings, url_of
from router.launch.config import load_fleet_config
from router.launch.model_folder import prepare_model
from router.launch.plan import threads_per_core
from router.launch.ports import require_free


def engine(invocation: Invocation) -> NoReturn:
    """Serve one model until a signal; does not return."""
    parser = _parser(invocation)
    flags = parser.read()
    overrides = parser.overrides(flags)
    config = load_fleet_config(invocation.config_file, overrides)
    worker = config.plain("worker")
    require_free(worker["host"], worker["port"], flag="--port")
    model = prepare_model(
        worker["model"], dtype=worker["dtype"], cache_dir=worker["cache_dir"], say=_say
    )
    settings = ReplicaSettings(
        replica_id=f"engine-{worker['port']}",
        host=worker["host"],
        port=worker["port"],
        model_folder=model.folder,
        served_models=tuple(
            flags.served_model_name or [worker["served_model_name"] or model.model]
        ),
        dtype=model.dtype,
        num_threads=worker["num_threads"] or threads_per_core(worker["data_parallel_size"]),
        engine=config.plain("engine"),
        kv_cache_memory_bytes=worker["kv_cache_memory_bytes"],
        api_key=worker["api_key"],
        advertised_url=url_of(worker["host"], worker["port"]),
        renew_s=worker["renew_s"],
        lease_s=worker["lease_s"],
        drain_timeout_s=worker["drain_timeout_s"],
        data_parallel_size=worker["data_parallel_size"],
        runner_process=worker["runner_process"],
        step_log_dir=worker["step_log_dir"],
    )
    _say(f"serving {', '.join(settings.served_models)} on {settings.advertised_url}/v1")
    _become_front(settings)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser(invocation: Invocation) -> CommandParser:
    parser = CommandParser(invocation, "Serve one model alone, with vLLM's flag names.")
    parser.override(
        "model", "worker.model", nargs="?", help='"demo" or a Hugging Face folder', metavar="MODEL"
    )
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
    ):
        parser.override(flag, setting, type=int, help=text)
    for flag, setting, text in (
        ("--dtype", "worker.dtype", "auto, float32 or bfloat16"),
        ("--host", "worker.host", "address to listen on"),
        ("--api-key", "worker.api_key", "key that requests must carry"),
        ("--step-log-dir", "worker.step_log_dir", "folder for recordings of every step"),
    ):
        parser.override(flag, setting, help=text)
    parser.override(
        "--runner-process",
        "worker.runner_process",
        action="store_true",
        default=None,
        help="give the model a process of its own",
    )
    caching = "engine.enable_prefix_caching"
    parser.override(
        "--enable-prefix-caching", caching, action="store_true", default=None, help="the default"
    )
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

"""The flags of `prefixfleet engine`, under vLLM's names where vLLM has such a flag.

What a flag may be given is known by the settings that it overrides.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any, NamedTuple

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation


class _Flag(NamedTuple):
    """A flag that gives one setting a value."""

    name: str
    setting: str
    value: str
    help: str


_NUMBERS = (
    _Flag(
        "--max-model-len",
        "engine.max_model_len",
        "TOKENS",
        "longest prompt plus output; 0: the model's own limit",
    ),
    _Flag("--max-num-seqs", "engine.max_num_seqs", "N", "requests in one step"),
    _Flag(
        "--max-num-batched-tokens", "engine.max_num_batched_tokens", "TOKENS", "tokens in one step"
    ),
    _Flag("--block-size", "engine.block_size", "TOKENS", "tokens in a block of the KV cache"),
    _Flag(
        "--kv-cache-memory-bytes",
        "worker.kv_cache_memory_bytes",
        "BYTES",
        "memory of the KV cache; null: as much as fits",
    ),
    _Flag("--num-threads", "worker.num_threads", "N", "threads that compute; 0: one per core"),
    _Flag("--port", "worker.port", "PORT", "port of the API"),
    _Flag("--data-parallel-size", "worker.data_parallel_size", "N", "engine cores behind the API"),
    _Flag(
        "--tensor-parallel-size", "worker.tensor_parallel_size", "N", "processes that share a model"
    ),
)
_TEXTS = (
    _Flag("--dtype", "worker.dtype", "NAME", "of weights: auto, float32 or bfloat16"),
    _Flag("--host", "worker.host", "ADDRESS", "address to listen on"),
    _Flag(
        "--distributed-executor-backend",
        "worker.distributed_executor_backend",
        "NAME",
        "where the processes of a shared model run: mp (this machine) or ray",
    ),
    _Flag("--api-key", "worker.api_key", "KEY", "key that requests must carry; null: none"),
    _Flag(
        "--step-log-dir",
        "worker.step_log_dir",
        "DIR",
        "folder for recordings of every step, prompts included; null: none",
    ),
    _Flag(
        "--tool-call-parser",
        "worker.tool_call_parser",
        "NAME",
        "hermes, mistral or llama3_json; null: told by the model's template",
    ),
    _Flag(
        "--reasoning-parser",
        "worker.reasoning_parser",
        "NAME",
        "qwen3, deepseek_r1 or mistral; null: told by the model's template",
    ),
    _Flag("--device", "worker.device", "NAME", "auto, cpu or cuda"),
    _Flag(
        "--cuda-graph-mode",
        "worker.cuda_graph_mode",
        "NAME",
        "none, piecewise, full, full_decode_only or full_and_piecewise",
    ),
)
_SWITCHES = (
    ("--enforce-eager", "worker.enforce_eager", "run without CUDA graphs"),
    ("--runner-process", "worker.runner_process", "give the model a process of its own"),
    (
        "--deterministic",
        "worker.deterministic",
        "the same tokens alone and in any batch, in bfloat16 too",
    ),
    ("--enable-prefix-caching", "engine.enable_prefix_caching", "reuse cached blocks of prompts"),
)


def engine_parser(invocation: Invocation) -> CommandParser:
    """Return the parser of `prefixfleet engine`."""
    parser = CommandParser(invocation, "Serve one model alone, with vLLM's flag names.")
    parser.override(
        "model", "worker.model", nargs="?", metavar="MODEL", help="a Hugging Face folder, or `demo`"
    )
    _add_membership(parser)
    for flag in _NUMBERS:
        parser.override(flag.name, flag.setting, type=int, metavar=flag.value, help=flag.help)
    for flag in _TEXTS:
        parser.override(flag.name, flag.setting, metavar=flag.value, help=flag.help)
    parser.override(
        "--gpu-memory-utilization",
        "worker.gpu_memory_utilization",
        type=float,
        metavar="SHARE",
        help="part of a GPU's memory that the engine may take, above 0 and up to 1",
    )
    parser.override(
        "--kv-events-config",
        "worker.kv_events",
        type=_json_object,
        metavar="JSON",
        help="KV events with tokens in them, for routers of other make",
    )
    for name, setting, text in _SWITCHES:
        parser.override(name, setting, action="store_true", default=None, help=text)
    parser.override(
        "--no-enable-prefix-caching",
        "engine.enable_prefix_caching",
        action="store_false",
        default=None,
        help="compute every prompt anew",
        dest="no_enable_prefix_caching",
    )
    return parser


def _add_membership(parser: CommandParser) -> None:
    """Add what the replica is called, and the fleet that it joins."""
    parser.add_argument(
        "--join", action="store_true", help="register in the fleet of --redis, with its secrets"
    )
    parser.override("--redis", "redis.index_url", metavar="URL", help="the fleet's index")
    parser.add_argument(
        "--replica-id", metavar="NAME", help="its name in the fleet (default: host and port)"
    )
    parser.add_argument(
        "--advertised-url", metavar="URL", help="where gateways reach it (default: host and port)"
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use (default: worker.served_model_name, else the model's)",
    )


def _json_object(text: str) -> dict[str, Any]:
    """Read a flag whose value is a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ArgumentTypeError(f"expected a JSON object, not {text!r}") from None

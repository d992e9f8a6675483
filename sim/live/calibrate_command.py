"""`prefixfleet replay calibrate`: measure a live server, fit, write the profile."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError, PrefixFleetError
from kvindex.foundation.tls import Trust
from sim.config import ReplayConfig
from sim.live.client import connected
from sim.live.fit import Fit, Sample, fit
from sim.live.fleet_settings import (
    KEY_VARIABLE,
    FleetAddress,
    base_url,
    find_replica,
    read_settings,
)
from sim.live.measure import MeasurePlan, Measurer
from sim.live.prompts import DEFAULT_VOCAB_SIZE
from sim.progress import progress_bar
from sim.traces.text_table import Cell, text_table

_MS = 1000.0


def run(invocation: Invocation) -> int:
    """Measure a server, write the profile, print how well it fits."""
    flags = _parser(invocation).read()
    address, max_step_tokens = _server(invocation, flags)
    samples, plan = asyncio.run(_measure(address, flags, max_step_tokens))
    found = fit(samples)
    model = found.model(
        name=f"{plan.model} at {address.url}",
        source=f"measured with {plan.num_requests} requests; mean error {found.mean_error:.1%}",
    )
    try:
        flags.output.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise PrefixFleetError(f"{flags.output}: {error.strerror}") from None
    if invocation.as_json:
        print(msgspec.json.encode({"fit": found, "samples": samples}).decode())
    else:
        print(_text(found, samples))
        print(f"\nwritten to {flags.output}; use it with `replay run --latency {flags.output}`")
    return 0


def _server(invocation: Invocation, flags: argparse.Namespace) -> tuple[FleetAddress, int]:
    """Return which server to measure, and the most tokens that it computes in a step."""
    max_step_tokens: int = (
        flags.max_num_batched_tokens or ReplayConfig().engine.max_num_batched_tokens
    )
    if flags.url is not None:
        key = flags.key or os.environ.get(KEY_VARIABLE)
        address = FleetAddress(url=base_url(flags.url), key=key, trust=Trust(ca=flags.ca))
        return address, max_step_tokens
    if invocation.config_file is None:
        raise ConfigError("which replica? give --url, or a running fleet's configuration with -c")
    settings = read_settings(invocation.config_file)
    if flags.max_num_batched_tokens is None:
        max_step_tokens = settings.engine.max_num_batched_tokens
    return find_replica(flags.run_dir or settings.run_dir), max_step_tokens


async def _measure(
    address: FleetAddress, flags: argparse.Namespace, max_step_tokens: int
) -> tuple[list[Sample], MeasurePlan]:
    async with connected(address) as client:
        plan = MeasurePlan(
            model=flags.model or await client.only_model(),
            max_prompt=flags.max_prompt,
            repeats=flags.repeats,
            num_output_tokens=flags.output_tokens,
            max_step_tokens=max_step_tokens,
            vocab_size=flags.vocab_size,
            seed=secrets.randbits(64),
        )
        with progress_bar("requests", plan.num_requests) as done:
            return await Measurer(client, plan, done).measure(), plan


def _parser(invocation: Invocation) -> CommandParser:
    parser = CommandParser(
        invocation,
        "Measure a live replica, ours or any server with OpenAI completions, that is otherwise "
        "idle, and write the latency profile that `replay run --latency FILE` takes.",
    )
    parser.add_argument("--url", help="of the replica (default: the first of the fleet of -c)")
    parser.add_argument("--ca", metavar="FILE", help="authorities that may vouch for an https URL")
    parser.add_argument("--run-dir", type=Path, help="of the fleet (default: as configured)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--key", help=f"its API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--model", help="served model, where there are several")
    parser.add_argument("--max-prompt", type=_at_least(128), default=2048, metavar="TOKENS")
    parser.add_argument("--repeats", type=_at_least(1), default=5, help="of each prompt length")
    parser.add_argument("--output-tokens", type=_at_least(8), default=24, help="of each decode")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=_at_least(1),
        help="the server's limit of tokens per step (default: as configured, else "
        f"{ReplayConfig().engine.max_num_batched_tokens})",
    )
    parser.add_argument(
        "--vocab-size",
        type=_at_least(2),
        default=DEFAULT_VOCAB_SIZE,
        help="prompts are of token ids below this (default %(default)s)",
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """Return a converter for argparse that refuses what is smaller."""

    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return convert


def _text(found: Fit, samples: Sequence[Sample]) -> str:
    rows: list[list[Cell]] = []
    for sample in samples:
        predicted_s = found.predicted_s(sample)
        error = f"{predicted_s / sample.measured_s - 1:+.1%}" if sample.measured_s else "-"
        rows.append([sample.what, _MS * sample.measured_s, _MS * predicted_s, error])
    costs = "\n".join(f"  {name} = {value:.3e}" for name, value in found.costs.items())
    return (
        f"{text_table(('', 'measured ms', 'fitted ms', 'error'), rows)}\n\n{costs}\n\n"
        f"error: {found.mean_error:.1%} in the mean, {found.max_error:.1%} at most"
    )

"""`prefixfleet replay calibrate`: measure a live server, fit, write the profile."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
    address, limits = _server(invocation, flags)
    samples, plan = asyncio.run(_measure(address, flags, limits))
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


class _StepLimits(NamedTuple):
    """The most that the server computes in a step; 0 seconds are no limit."""

    tokens: int
    seconds: float


def _server(invocation: Invocation, flags: argparse.Namespace) -> tuple[FleetAddress, _StepLimits]:
    """Return which server to measure, and what limits its steps."""
    if flags.url is not None:
        key = flags.key or os.environ.get(KEY_VARIABLE)
        address = FleetAddress(url=base_url(flags.url), key=key, trust=Trust(ca=flags.ca))
        limits = _StepLimits(ReplayConfig().engine.max_num_batched_tokens, 0.0)
    elif invocation.config_file is not None:
        settings = read_settings(invocation.config_file)
        address = find_replica(flags.run_dir or settings.run_dir)
        limits = _StepLimits(settings.engine.max_num_batched_tokens, settings.engine.max_step_s)
    else:
        raise ConfigError("which replica? give --url, or a running fleet's configuration with -c")
    tokens = limits.tokens if flags.max_num_batched_tokens is None else flags.max_num_batched_tokens
    seconds = limits.seconds if flags.max_step_s is None else flags.max_step_s
    return address, _StepLimits(tokens, seconds)


async def _measure(
    address: FleetAddress, flags: argparse.Namespace, limits: _StepLimits
) -> tuple[list[Sample], MeasurePlan]:
    async with connected(address) as client:
        plan = MeasurePlan(
            model=flags.model or await client.only_model(),
            max_prompt=flags.max_prompt,
            repeats=flags.repeats,
            num_output_tokens=flags.output_tokens,
            max_step_tokens=limits.tokens,
            max_step_s=limits.seconds,
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
    parser.add_argument(
        "--url", help="the replica's (default: that of the first of the fleet of -c)"
    )
    parser.add_argument(
        "--ca", metavar="FILE", help="authorities for an https URL (default: the system's)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="run directory of the fleet (default: as configured)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write the profile, as JSON",
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"its API key (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    _add_measurements(parser)
    return parser


def _add_measurements(parser: CommandParser) -> None:
    """Add what is measured, and what is known of the server's steps."""
    parser.add_argument(
        "--max-prompt",
        type=_at_least(128),
        default=2048,
        metavar="TOKENS",
        help="the longest prompt that is measured",
    )
    parser.add_argument(
        "--repeats",
        type=_at_least(1),
        default=5,
        metavar="N",
        help="measurements of each prompt length",
    )
    parser.add_argument(
        "--output-tokens",
        type=_at_least(8),
        default=24,
        metavar="TOKENS",
        help="tokens of each decode",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=_at_least(1),
        metavar="TOKENS",
        help="the server's limit of tokens per step (default: as configured, else "
        f"{ReplayConfig().engine.max_num_batched_tokens})",
    )
    parser.add_argument(
        "--max-step-s",
        type=float,
        metavar="SECONDS",
        help="the server's limit of a step's time, 0 for none (default: as configured, else 0)",
    )
    parser.add_argument(
        "--vocab-size",
        type=_at_least(2),
        default=DEFAULT_VOCAB_SIZE,
        metavar="N",
        help="prompts are of token ids below this",
    )


def _at_least(least: int) -> Callable[[str], int]:
    """Return a converter for argparse that takes whole numbers, none smaller."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

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

"""`prefixfleet trace stats | convert | synth | overlay-tenants`: flags, and what is printed.

Results go to standard output, what was inferred about the input to standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.clock import SystemClock
from sim.progress import progress_bar
from sim.traces.measure import trace_stats
from sim.traces.reading_flags import add_reading
from sim.traces.registry import FORMATS
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.stats_text import stats_text
from sim.traces.synth import Synthesizer, SynthPlan
from sim.traces.tenants import TenantOverlay, Unit, choose_unit, largest, servegen_weights
from sim.traces.trace import Trace, open_trace
from sim.traces.writer import write_trace

if TYPE_CHECKING:
    from engine.frontend.prompt import PromptEncoder

# Prompts of a log were accepted once: no length is too long to be counted.
_ANY_LENGTH = sys.maxsize
ROWS_PER_STEP = 1000


def stats(invocation: Invocation) -> int:
    """Print lengths, reuse, skew and bounds of a trace."""
    parser = _input_parser(invocation, "Describe a trace, and the bounds that it sets.")
    parser.add_argument(
        "--capacities",
        type=_numbers,
        metavar="N,N,…",
        help="capacities of the curves, in blocks (default: doubling from 16)",
    )
    flags = parser.read()
    described = trace_stats(_open(flags), capacities=flags.capacities, watch=_watched)
    if invocation.as_json:
        print(msgspec.json.format(msgspec.json.encode(described), indent=2).decode())
    else:
        print(stats_text(described))
    return 0


def convert(invocation: Invocation) -> int:
    """Write a trace of any format as kvtrace/1."""
    parser = _input_parser(invocation, "Validate a trace and write it as kvtrace/1.")
    _add_output(parser)
    parser.add_argument(
        "--source",
        metavar="TEXT",
        help="where the trace comes from, for the header (default: as it says)",
    )
    parser.add_argument(
        "--licence", metavar="TEXT", help="its licence, for the header (default: as it says)"
    )
    flags = parser.read()
    trace = _open(flags)
    header = msgspec.structs.replace(
        trace.header,
        source=flags.source or trace.header.source,
        licence=flags.licence or trace.header.licence,
    )
    _say_notes(trace)
    return _report(invocation, flags.output, _write(flags.output, header, trace.rows()))


def synth(invocation: Invocation) -> int:
    """Draw a new trace from the prefix tree of a recorded one."""
    parser = _input_parser(invocation, "Draw a trace from the prefix tree of another.")
    _add_output(parser)
    _add_seed(parser)
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="how many (default: as the source)"
    )
    parser.add_argument(
        "--root-multiplier",
        type=positive,
        default=1,
        metavar="N",
        help="copies of the tree",
    )
    for name, what in (("prefix", "shared paths are"), ("prompt", "what follows them is")):
        parser.add_argument(
            f"--{name}-multiplier",
            type=_positive_float,
            default=1.0,
            metavar="X",
            help=f"how many times as long {what}",
        )
    flags = parser.read()
    trace = _open(flags)
    _say_notes(trace)
    plan = SynthPlan(
        seed=flags.seed,
        num_requests=flags.requests,
        root_multiplier=flags.root_multiplier,
        prefix_multiplier=flags.prefix_multiplier,
        prompt_multiplier=flags.prompt_multiplier,
    )
    drawn = Synthesizer(trace, plan)
    return _report(invocation, flags.output, _write(flags.output, drawn.header, drawn.rows()))


def overlay_tenants(invocation: Invocation) -> int:
    """Give a trace tenants, by weights or as skewed as ServeGen's clients."""
    parser = _input_parser(invocation, "Draw a tenant for each session or prefix of a trace.")
    _add_output(parser)
    _add_seed(parser)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--weights", type=_weights, metavar="NAME=W,…", help="tenants, each with its share"
    )
    weights.add_argument(
        "--servegen", type=Path, metavar="FOLDER", help="client files of ServeGen, for shares"
    )
    parser.add_argument(
        "--tenants", type=positive, metavar="N", help="only the largest so many (default: all)"
    )
    parser.add_argument(
        "--by",
        choices=get_args(Unit),
        help="what has one tenant (default: sessions if it has them, else what prompts share)",
    )
    parser.add_argument("--isolate", action="store_true", help="salt ids: tenants share no block")
    flags = parser.read()
    trace = _open(flags)
    _say_notes(trace)
    chosen = flags.weights if flags.servegen is None else servegen_weights(flags.servegen)
    overlay = TenantOverlay(
        weights=chosen if flags.tenants is None else largest(chosen, flags.tenants),
        seed=flags.seed,
        unit=flags.by or choose_unit(trace),
        isolated=flags.isolate,
    )
    _say(f"one tenant per {overlay.unit}")
    rows = overlay.rows(trace)
    return _report(invocation, flags.output, _write(flags.output, trace.header, rows))


def _input_parser(invocation: Invocation, description: str) -> CommandParser:
    parser = CommandParser(invocation, description)
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, also .gz, .xz or .zst")
    group = parser.add_argument_group("how the file is read")
    group.add_argument(
        "--format",
        metavar="NAME",
        help=f"one of {', '.join(FORMATS)} (default: guessed from the first line)",
    )
    group.add_argument(
        "--block-size",
        type=positive,
        metavar="TOKENS",
        help="tokens in a block (default: as the file tells)",
    )
    add_reading(group)
    group.add_argument(
        "--session-gap",
        type=_positive_float,
        metavar="SECONDS",
        help="mean time between conversations without one clock (default: none; weka needs it)",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="model folder (default: none; logs of requests need it)",
    )
    return parser


def _add_output(parser: CommandParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file to write"
    )


def _add_seed(parser: CommandParser) -> None:
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="equal seeds give equal files"
    )


def _open(flags: argparse.Namespace) -> Trace:
    return open_trace(
        flags.file,
        format=flags.format,
        block_size=flags.block_size,
        tail=flags.tail,
        lengths=flags.lengths,
        session_gap_s=flags.session_gap,
        prompts=None if flags.tokenizer is None else load_prompts(flags.tokenizer),
    )


def load_prompts(folder: Path) -> PromptEncoder:
    """Load a model's tokenizer and template; ConfigError names what is missing."""
    # The tokenizer library is loaded for logs of request bodies only.
    from engine.frontend.prompt import PromptEncoder
    from engine.frontend.tokenizer_bundle import load_bundle

    return PromptEncoder(load_bundle(folder), clock=SystemClock(), max_model_len=_ANY_LENGTH)


def _write(path: Path, header: TraceHeader, rows: Iterator[TraceRow]) -> int:
    return write_trace(path, header, _watched(rows))


def _watched(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Pass rows on; show a person how many thousand there were."""
    with progress_bar("thousand requests", None) as advance:
        for number, row in enumerate(rows, start=1):
            yield row
            if number % ROWS_PER_STEP == 0:
                advance()


def _report(invocation: Invocation, output: Path, num_rows: int) -> int:
    if invocation.as_json:
        print(msgspec.json.encode({"file": str(output), "requests": num_rows}).decode())
    else:
        print(f"{output}: {num_rows:,} requests")
    return 0


def _say_notes(trace: Trace) -> None:
    for note in trace.notes:
        _say(note)


def _say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def positive(text: str) -> int:
    """Read a flag's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _weights(text: str) -> dict[str, float]:
    weights = {}
    for part in text.split(","):
        name, equals, weight = part.partition("=")
        if not (name and equals):
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=WEIGHT")
        weights[name] = _positive_float(weight)
    return weights

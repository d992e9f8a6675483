"""Decode speed with guesses from the request's own text, beside the same without.

    python -m benchmarks.bench_speculation [--quick] [--json] [--threads N] [MODEL_FOLDER]

Each run decodes one request; runs with and without speculation alternate, and the figure is the
median of their ratios. Seconds are those of the wall clock, and, less disturbed by neighbours, of
this process's own computing. Tokens are compared: they must be the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.demo_folder import demo_folder
from benchmarks.speculation_workloads import WORKLOADS, Workload
from benchmarks.timing import Report, Row, at_least, flags, machine, show
from engine.config import EngineConfig, SpeculationConfig
from engine.core import EngineCore
from engine.messages import EngineRequest
from kvindex.foundation.clock import SystemClock
from worker.executors.uniproc import UniprocExecutor

_NUM_BLOCKS = 256


class Run(NamedTuple):
    """One decoded request; seconds, steps and guesses are those behind its first token."""

    token_ids: list[int]
    wall_s: float
    cpu_s: float
    num_steps: int
    num_guesses: int


class Engine:
    """A core over the model, with one setting of speculation."""

    def __init__(self, folder: Path, speculation: SpeculationConfig, *, num_threads: int) -> None:
        config = EngineConfig(speculation=speculation, enable_prefix_caching=True)
        self._executor = UniprocExecutor(
            folder,
            dtype="float32",
            engine_config=config,
            num_threads=num_threads,
            num_blocks=_NUM_BLOCKS,
        )
        self.core = EngineCore(config, self._executor, SystemClock())
        self._num_runs = 0
        self._num_guesses = 0

    def run(self, prompt: list[int], workload: Workload, num_tokens: int) -> Run:
        """Decode a request alone; its prompt is cached after the first run."""
        self._num_runs += 1
        self.core.add(
            EngineRequest(
                request_id=f"run-{self._num_runs}",
                prompt_token_ids=prompt,
                sampling=workload.sampling(num_tokens),
            )
        )
        tokens: list[int] = []
        while not tokens:
            tokens += [t for output in self.core.step() for t in output.token_ids]
        wall, cpu, num_steps = time.perf_counter(), time.process_time(), 0
        while self.core.has_work:
            tokens += [t for output in self.core.step() for t in output.token_ids]
            num_steps += 1
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        num_guesses = self.core.stats().spec_draft_tokens_total - self._num_guesses
        self._num_guesses += num_guesses
        return Run(tokens, wall_s, cpu_s, num_steps, num_guesses)

    def close(self) -> None:
        """Give the model back."""
        self._executor.close()


class Figures(NamedTuple):
    """Medians of pairs: speed-ups by the clock and by computing, and what explains them."""

    wall: float
    cpu: float
    tokens_per_step: float
    num_guesses: float
    plain_tokens_per_s: float


def compare(
    plain: Engine, guessing: Engine, workload: Workload, prompt: list[int], options: Options
) -> Figures:
    """Alternate runs of one workload; raise when the tokens differ."""
    pairs: list[tuple[Run, Run]] = []
    for i in range(1 + options.num_runs):
        order = (plain, guessing) if i % 2 else (guessing, plain)
        runs = {engine: engine.run(prompt, workload, options.num_tokens) for engine in order}
        without, with_guesses = runs[plain], runs[guessing]
        if without.token_ids != with_guesses.token_ids:
            raise SystemExit(f"{workload.name}: speculation changed the output")
        if i:  # The first pair warms caches.
            pairs.append((without, with_guesses))
        print(f"{workload.name}: run {i} of {options.num_runs}", end="\r", file=sys.stderr)
    return Figures(
        wall=statistics.median(a.wall_s / b.wall_s for a, b in pairs),
        cpu=statistics.median(a.cpu_s / b.cpu_s for a, b in pairs),
        tokens_per_step=statistics.median((options.num_tokens - 1) / b.num_steps for _, b in pairs),
        num_guesses=statistics.median(b.num_guesses for _, b in pairs),
        plain_tokens_per_s=statistics.median((options.num_tokens - 1) / a.wall_s for a, _ in pairs),
    )


class Options(NamedTuple):
    """How much is measured."""

    num_runs: int
    num_tokens: int


def rows(workload: Workload, figures: Figures) -> list[Row]:
    """Build the rows of one workload; its goal is a speed-up, by the clock."""
    name = workload.name
    return [
        at_least(f"{name}: speed-up", figures.wall, "x", workload.goal),
        at_least(f"{name}: speed-up by seconds computed", figures.cpu, "x", workload.goal),
        Row(name=f"{name}: tokens per step", ours=figures.tokens_per_step, unit=""),
        Row(name=f"{name}: guesses per run", ours=figures.num_guesses, unit=""),
        Row(name=f"{name}: without, tokens/s", ours=figures.plain_tokens_per_s, unit="1/s"),
    ]


def measure(folder: Path, options: Options, *, num_threads: int) -> Sequence[Row]:
    """Compare all workloads on one model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = Engine(folder, SpeculationConfig(), num_threads=num_threads)
    guessing = Engine(folder, SpeculationConfig(method="ngram"), num_threads=num_threads)
    found: list[Row] = []
    try:
        for workload in WORKLOADS:
            prompt = tokenizer.encode(workload.prompt).ids
            found += rows(workload, compare(plain, guessing, workload, prompt, options))
    finally:
        plain.close()
        guessing.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = flags(__doc__ or "")
    parser.add_argument("model", nargs="?", type=Path, help="folder; default: the demo model")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    chosen = parser.parse_args()
    folder = chosen.model or demo_folder()
    options = Options(2, 32) if chosen.quick else Options(10, 48)
    report = Report(
        claim="Guessing speeds copies up, and costs nothing where nothing can be guessed",
        machine=machine(),
        settings={
            "model": folder.name,
            "dtype": "float32",
            "threads": chosen.threads,
            "runs": options.num_runs,
            "tokens": options.num_tokens,
        },
        rows=list(measure(folder, options, num_threads=chosen.threads)),
    )
    show(report, as_json=chosen.json)


if __name__ == "__main__":
    main()

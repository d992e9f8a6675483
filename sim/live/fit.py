"""From measured times to a latency model: least squares of relative errors, nothing negative.

Pure arithmetic over samples. Prefill is told by times to a first token, decode by intervals
between tokens; together they tell apart what a step costs and what a request costs outside of the
engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from kvindex.foundation.errors import PrefixFleetError
from sim.latency import LatencyModel

COSTS = ("outside_s", "base_s", "per_prefill_token_s", "per_prefill_pair_s", "per_decode_s",
         "per_context_token_s")  # fmt: skip
"""What is fitted, in the order of a sample's counts."""

_SINGULAR = 1e-12


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured time and how often each cost is in it, in the order of `COSTS`."""

    what: str
    measured_s: float
    counts: tuple[float, float, float, float, float, float]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The costs that explain the samples best; errors are shares of what was measured."""

    costs: dict[str, float]
    mean_error: float
    max_error: float

    def predicted_s(self, sample: Sample) -> float:
        """Return the time that the costs give for a sample."""
        return sum(self.costs[name] * n for name, n in zip(COSTS, sample.counts, strict=True))

    def model(self, *, name: str, source: str) -> LatencyModel:
        """Return the costs as what a replay takes."""
        return LatencyModel(name=name, calibrated=True, source=source, **self.costs)


def first_token_sample(
    what: str,
    *,
    ttft_s: float,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    max_step_tokens: int,
) -> Sample:
    """Count what a first token needs on an idle engine: the uncached part, in steps."""
    uncached = num_prompt_tokens - num_cached_tokens
    num_steps = -(-uncached // max_step_tokens)
    if uncached == 1:
        counts = (1.0, 1.0, 0.0, 0.0, 1.0, float(num_cached_tokens))
    else:
        pairs = uncached * num_cached_tokens + uncached * (uncached - 1) / 2
        counts = (1.0, float(num_steps), float(uncached), float(pairs), 0.0, 0.0)
    return Sample(what=what, measured_s=ttft_s, counts=counts)


def decode_sample(what: str, *, interval_s: float, batch: int, context: float) -> Sample:
    """Count what a decode step of `batch` requests needs; `context` is the sum of theirs."""
    counts = (0.0, 1.0, 0.0, 0.0, float(batch), context)
    return Sample(what=what, measured_s=interval_s, counts=counts)


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the costs of least relative error; raise PrefixFleetError without any measured time.

    Every subset of the costs is solved for and the best without a negative one is taken: exact,
    and with so few unknowns quick.
    """
    usable = [sample for sample in samples if sample.measured_s > 0]
    if not usable:
        raise PrefixFleetError("nothing was measured: the server sent no tokens")
    rows = [[count / sample.measured_s for count in sample.counts] for sample in usable]
    best: tuple[float, list[float]] | None = None
    for size in range(1, len(COSTS) + 1):
        for chosen in itertools.combinations(range(len(COSTS)), size):
            costs = _solve(rows, chosen)
            if costs is None or min(costs) < 0:
                continue
            loss = sum((_dot(row, costs) - 1) ** 2 for row in rows)
            if best is None or loss < best[0]:
                best = loss, costs
    assert best is not None, "one cost alone always has a solution"
    errors = [abs(_dot(row, best[1]) - 1) for row in rows]
    return Fit(
        costs=dict(zip(COSTS, best[1], strict=True)),
        mean_error=sum(errors) / len(errors),
        max_error=max(errors),
    )


def _dot(row: Sequence[float], costs: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, costs, strict=True))


def _solve(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Solve the normal equations for the chosen costs, the others 0; None when they are singular.

    Columns are scaled to unit length first, as pairs are a million times tokens.
    """
    scales = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in chosen]
    if not all(scales):
        return None
    columns = [[row[i] / s for row in rows] for i, s in zip(chosen, scales, strict=True)]
    matrix = [[_dot(a, b) for b in columns] + [sum(a)] for a in columns]
    solution = _eliminate(matrix)
    if solution is None:
        return None
    costs = [0.0] * len(COSTS)
    for i, scale, value in zip(chosen, scales, solution, strict=True):
        costs[i] = value / scale
    return costs


def _eliminate(matrix: list[list[float]]) -> list[float] | None:
    """Solve a square system given with its right-hand side as the last column."""
    size = len(matrix)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < _SINGULAR:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(size):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]

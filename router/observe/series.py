"""Counters and histograms of one event loop, for prometheus_client's registry.

The library's own take a lock and half a dozen calls for each step, which was a tenth of a short
request. These are plain numbers that one thread alone changes; a scrape reads them from another.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str | int, ...]


@dataclass(slots=True)
class Count:
    """One counter."""

    value: float = 0.0
    began_at: float = field(default_factory=time.time)

    def inc(self, amount: float = 1.0) -> None:
        """Count on."""
        self.value += amount


class Counters(Collector):
    """Counters of one name, by the values of their labels; without labels there is just one."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counts: dict[Labels, Count] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str | int) -> Count:
        """Return a counter, which is there from now on."""
        found = self._counts.get(values)
        if found is None:
            assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}"
            found = self._counts[values] = Count()
        return found

    def inc(self, amount: float = 1.0) -> None:
        """Count on where there are no labels."""
        self.labels().inc(amount)

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric([str(v) for v in values], count.value, created=count.began_at)
        yield family


@dataclass(slots=True)
class Observations:
    """One histogram: how many values were at most each bound, and above all of them."""

    bounds: Sequence[float]
    counts: list[int]
    total: float = 0.0
    began_at: float = field(default_factory=time.time)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histograms(Collector):
    """Histograms of one name and the same bounds, by the values of their labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = bounds
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._histograms: dict[Labels, Observations] = {}
        registry.register(self)

    def labels(self, *values: str | int) -> Observations:
        """Return a histogram, which is there from now on."""
        found = self._histograms.get(values)
        if found is None:
            assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}"
            counts = [0] * len(self._names)
            found = self._histograms[values] = Observations(self._bounds, counts)
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, seen in list(self._histograms.items()):
            words = [str(value) for value in values]
            below = zip(self._names, accumulate(seen.counts), strict=True)
            family.add_metric(words, [(name, float(n)) for name, n in below], seen.total)
            named = dict(zip(self._labels, words, strict=True))
            family.add_sample(f"{self._name}_created", named, seen.began_at)
        yield family

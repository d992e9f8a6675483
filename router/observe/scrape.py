"""One Prometheus scrape of several processes: their texts as one, told apart by a label.

Each series stays that of one process (label `process`), so that a restart of one is a reset of its
own counters and of no other's; sums are the query's. It knows no metric by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PROCESS_LABEL = "process"


def merge_scrapes(texts: Mapping[int, bytes]) -> bytes:
    """Return the texts of processes, by their number, as one text; O(size), not for an event loop.

    `prefixfleet_gateway_processes` tells how many have answered.
    """
    families: dict[str, Metric] = {}
    for number, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            merged = families.get(family.name)
            if merged is None:
                merged = Metric(family.name, family.documentation, family.type)
                families[family.name] = merged
            for sample in family.samples:
                labels = {**sample.labels, PROCESS_LABEL: str(number)}
                merged.add_sample(sample.name, labels, sample.value)
    answered = Metric("prefixfleet_gateway_processes", "Processes that answered", "gauge")
    answered.add_sample(answered.name, {}, len(texts))
    registry = CollectorRegistry()
    registry.register(_Families([*families.values(), answered]))
    return generate_latest(registry)


class _Families:
    """Hands families to prometheus_client as a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)

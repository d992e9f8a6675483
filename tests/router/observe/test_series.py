"""Our counters and histograms are scraped exactly as prometheus_client's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.observe.series import Counters, Histograms

BOUNDS = (0.01, 0.5, 1, 30)


def scraped(registry: CollectorRegistry) -> list[str]:
    """Return a scrape without the instants at which series began."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created{" not in line and "_created " not in line)


def test_counters_are_scraped_as_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for registry, kind in ((ours, Counters), (theirs, Counter)):
        requests = kind("pf_requests", "Requests", ["model", "status"], registry=registry)
        requests.labels("tiny", 200).inc()
        requests.labels("tiny", 200).inc(2.5)
        requests.labels('a "b"\n', 404).inc(0)
        plain = kind("pf_plain", "No labels", [], registry=registry)
        kind("pf_untouched", "No labels", [], registry=registry)
        kind("pf_empty", "Labels", ["x"], registry=registry)
        plain.inc()
    assert scraped(ours) == scraped(theirs)


def test_histograms_are_scraped_as_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = (
        Histograms("pf_seconds", "Time", ["model"], bounds=BOUNDS, registry=ours),
        Histogram("pf_seconds", "Time", ["model"], buckets=BOUNDS, registry=theirs),
    )
    for histogram in histograms:
        for value in (0.0, 0.01, 0.010001, 0.75, 1.0, 29.0, 30.0, 31.0, 1000.0):
            histogram.labels("tiny").observe(value)
        histogram.labels("other")
    assert scraped(ours) == scraped(theirs)


def test_series_say_when_they_began() -> None:
    registry = CollectorRegistry()
    Counters("pf_requests", "Requests", ["model"], registry=registry).labels("tiny").inc()
    histograms = Histograms("pf_seconds", "Time", ["model"], bounds=BOUNDS, registry=registry)
    histograms.labels("tiny").observe(1)
    lines = generate_latest(registry).decode().splitlines()
    for name in ("pf_requests_created", "pf_seconds_created"):
        assert any(line.startswith(f'{name}{{model="tiny"}} ') for line in lines), name

"""Several processes answer one scrape, each with series of its own."""

from __future__ import annotations

from router.observe.metrics import GatewayMetrics
from router.observe.scrape import merge_scrapes


def test_series_are_told_apart_by_process() -> None:
    texts = {}
    for number in (0, 1):
        metrics = GatewayMetrics()
        metrics.requests.labels("tiny", "acme", "prefix_cost", "200").inc(number + 1)
        metrics.in_flight.set(5 - number)
        metrics.timings_of("tiny", "acme").ttft.observe(0.02)
        texts[number] = metrics.render()
    lines = merge_scrapes(texts).decode().splitlines()
    labels = 'model="tiny",policy="prefix_cost",process="{}",status="200",tenant="acme"'
    name = "prefixfleet_requests_total"
    assert f"{name}{{{labels.format(0)}}} 1.0" in lines
    assert f"{name}{{{labels.format(1)}}} 2.0" in lines
    assert 'prefixfleet_requests_in_flight{process="0"} 5.0' in lines
    assert 'prefixfleet_requests_in_flight{process="1"} 4.0' in lines
    bucket = 'prefixfleet_time_to_first_token_seconds_bucket{le="0.025"'
    assert sum(line.startswith(bucket) and line.endswith(" 1.0") for line in lines) == 2
    assert "prefixfleet_gateway_processes 2.0" in lines
    kinds = [line for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


def test_a_process_that_does_not_answer_is_missing() -> None:
    lines = merge_scrapes({1: GatewayMetrics().render()}).decode().splitlines()
    assert "prefixfleet_gateway_processes 1.0" in lines

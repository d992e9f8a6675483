"""What a scrape says of single replicas, and of a certificate that is renewed."""

from __future__ import annotations

from router.observe.metrics import GatewayMetrics


def series(metrics: GatewayMetrics, word: str) -> list[str]:
    """Return the samples of a scrape that have a word in them."""
    lines = metrics.render().decode().splitlines()
    return [line for line in lines if word in line and not line.startswith("#")]


def test_a_replica_that_is_gone_is_in_no_scrape() -> None:
    metrics = GatewayMetrics()
    for replica in ("stays", "goes"):
        metrics.set_replica(replica, mode="EXACT", num_active=1, breaker="closed")
    metrics.keep_replicas(["stays"])
    assert series(metrics, "goes") == []
    assert 'prefixfleet_replica_mode{mode="EXACT",replica="stays"} 1.0' in series(metrics, "stays")
    metrics.keep_replicas([])
    assert series(metrics, "stays") == []


def test_the_end_of_a_certificate_is_that_of_the_moment() -> None:
    metrics = GatewayMetrics()
    name = "prefixfleet_tls_certificate_expires_timestamp_seconds"
    assert series(metrics, name) == []
    ends = [1000.0]
    metrics.follow_certificate("/etc/tls.crt", lambda: ends[-1])
    assert series(metrics, name) == [f'{name}{{file="/etc/tls.crt"}} 1000.0']
    ends.append(2000.0)
    assert series(metrics, name) == [f'{name}{{file="/etc/tls.crt"}} 2000.0']

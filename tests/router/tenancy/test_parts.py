"""The small pure parts of tenancy: periods, durations, expected output, patches, snapshots."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.config import Limits, TenantConfig, TenantKey
from router.request.limit_headers import duration, limit_headers
from router.tenancy.administration import merge
from router.tenancy.expected_output import FIRST_GUESS_TOKENS, ExpectedOutput
from router.tenancy.limits import Claim, Scope, ScopeUse, Verdict
from router.tenancy.periods import periods_at
from router.tenancy.snapshot import Snapshot, load_snapshot, save_snapshot
from router.tenancy.stored import StoredDirectory, StoredKey
from router.tenancy.tenants import Identity, TenantDirectory


def instant(text: str) -> float:
    """Return an instant of UTC in seconds since the Unix epoch."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("at", "day", "month", "day_left_s", "month_left_s"),
    [
        ("2026-11-29T00:00:00", "2026-11-29", "2026-11", 86_400, 2 * 86_400),
        ("2026-11-30T23:59:59", "2026-11-30", "2026-11", 1, 1),
        ("2026-12-31T12:00:00", "2026-12-31", "2026-12", 43_200, 43_200),
        ("2028-02-28T12:00:00", "2028-02-28", "2028-02", 43_200, 43_200 + 86_400),
    ],
)
def test_days_and_months_end_at_midnight_utc(
    at: str, day: str, month: str, day_left_s: float, month_left_s: float
) -> None:
    assert periods_at(instant(at)) == (day, month, day_left_s, month_left_s)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0004, "1ms"), (0.061, "61ms"), (1.5, "1.5s"), (61, "1m1s"), (3600, "60m0s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_of_the_scope_that_has_less_left() -> None:
    scopes = (
        Scope("tenant/acme", Limits(requests_per_minute=100, tokens_per_minute=1000)),
        Scope("key/0", Limits(requests_per_minute=10)),
    )
    use = ScopeUse(
        scope="x",
        num_requests=8,
        num_tokens=1200,
        reset_s=61,
        num_running=1,
        day_tokens=0,
        month_tokens=0,
    )
    claim = Claim(id="r", scopes=scopes, num_tokens=1)
    assert limit_headers(claim, Verdict(uses=(use, use))) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1s",
    }


def test_expected_output_is_the_90th_percentile_of_each_tenant() -> None:
    expected = ExpectedOutput()
    assert expected.tokens("acme", max_tokens=None) == FIRST_GUESS_TOKENS
    assert expected.tokens("acme", max_tokens=100) == 100
    for tokens in range(1, 102):
        expected.note("acme", tokens)
    assert expected.tokens("acme", max_tokens=None) == 91
    assert expected.tokens("acme", max_tokens=20) == 20
    assert expected.tokens("globex", max_tokens=None) == FIRST_GUESS_TOKENS


@pytest.mark.parametrize(
    ("value", "patch", "merged"),
    [
        (
            {"a": 1, "b": {"c": 2, "d": 3}},
            {"b": {"c": None, "e": 4}},
            {"a": 1, "b": {"d": 3, "e": 4}},
        ),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"b": None}}, {"a": {}}),
        ({"a": 1}, {}, {"a": 1}),
    ],
)
def test_patches_merge_as_rfc_7396_says(value: Any, patch: Any, merged: Any) -> None:
    assert merge(value, patch) == merged


def test_a_snapshot_comes_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "tenants.json"
    assert load_snapshot(file) == Snapshot()
    full = Snapshot(directory=StoredDirectory(generation="g", version=2), num_gateways=3)
    save_snapshot(file, full)
    assert load_snapshot(file) == full
    file.write_text("{")
    assert load_snapshot(file) == Snapshot()


def test_a_name_may_be_an_alias_of_the_tenant_narrowed_by_the_key() -> None:
    tenant = TenantConfig(name="acme", models=("big",), aliases={"gpt-4": "tiny"})
    everything = Identity(tenant, TenantKey(hash="0" * 64))
    narrow = Identity(tenant, TenantKey(hash="0" * 64, models=("gpt-4",)))
    served = ["big", "tiny", "other"]
    assert everything.usable(served) == {"big": "big", "gpt-4": "tiny"}
    assert narrow.usable(served) == {"gpt-4": "tiny"}
    assert [everything.model_of(name) for name in ("gpt-4", "tiny", "big")] == ["tiny", None, "big"]


def test_what_is_declared_wins_over_what_is_stored() -> None:
    key = TenantKey(hash="0" * 64, alias="declared")
    stored = StoredDirectory(
        generation="g",
        version=1,
        tenants=(TenantConfig(name="acme", weight=9.0), TenantConfig(name="new")),
        keys=(
            StoredKey(tenant="new", key=TenantKey(hash="0" * 64, alias="stored"), created_at=0),
            StoredKey(tenant="gone", key=TenantKey(hash="1" * 64), created_at=0),
            StoredKey(tenant="acme", key=TenantKey(hash="2" * 64, alias="more"), created_at=0),
        ),
    )
    directory = TenantDirectory([TenantConfig(name="acme", keys=(key,))], stored)
    assert [(t.name, t.weight) for t in directory.tenants] == [("acme", 1.0), ("new", 1.0)]
    assert [directory.holds(digit * 64) for digit in "012"] == [True, False, True]

"""Tenants for traces that have none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sim.oracle.bounds import by_tenant, infinite_cache
from sim.oracle.reuse import reuse_of
from sim.traces.errors import TraceError
from sim.traces.tenants import TenantOverlay, choose_unit, largest, servegen_weights
from tests.sim.traces.samples import (
    AZURE,
    CONVERSATION_1000,
    MAGAGENT,
    MINISWE,
    SYNTHETIC_1000,
    header,
    row,
    sample,
    write_lines,
)


def test_a_session_has_one_tenant_drawn_by_weight() -> None:
    overlay = TenantOverlay(weights={"a": 3.0, "b": 1.0}, seed=1, unit="session")
    rows = list(overlay.rows(sample(MINISWE)))
    pairs = {(row.session_id, row.tenant) for row in rows}
    assert len(pairs) == 20
    assert Counter(tenant for _, tenant in pairs) == {"a": 13, "b": 7}
    assert rows == list(overlay.rows(sample(MINISWE)))
    reseeded = TenantOverlay(weights={"a": 3.0, "b": 1.0}, seed=2, unit="session")
    assert rows != list(reseeded.rows(sample(MINISWE)))


def test_prefixes_stand_for_tenants_where_there_are_no_sessions() -> None:
    assert choose_unit(sample(MINISWE)) == "session"
    assert choose_unit(sample(SYNTHETIC_1000)) == "root"
    # One block is common to all requests: it tells nothing apart.
    assert choose_unit(sample(CONVERSATION_1000)) == "branch"
    with pytest.raises(TraceError, match="neither session_id nor hash_ids"):
        choose_unit(sample(AZURE))


def test_all_requests_of_a_prefix_have_its_tenant() -> None:
    overlay = TenantOverlay(weights={"a": 1.0, "b": 1.0}, unit="branch")
    tenants: dict[int, set[str | None]] = {}
    for found in overlay.rows(sample(CONVERSATION_1000)):
        assert found.hash_ids is not None
        tenants.setdefault(found.hash_ids[1], set()).add(found.tenant)
    assert {len(names) for names in tenants.values()} == {1}


def test_isolated_tenants_share_no_block() -> None:
    weights = {"a": 1.0, "b": 1.0}
    plain = list(TenantOverlay(weights=weights, unit="session").rows(sample(MAGAGENT)))
    isolated = list(
        TenantOverlay(weights=weights, unit="session", isolated=True).rows(sample(MAGAGENT))
    )
    bound = infinite_cache(reuse_of(plain, block_size=16, namespace=by_tenant))
    assert infinite_cache(reuse_of(isolated, block_size=16)) == bound
    assert bound.hit_blocks < infinite_cache(reuse_of(plain, block_size=16)).hit_blocks


def test_salting_reaches_the_blocks_of_the_output(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", header(), row(0, [1], session_id="s", output_hash_ids=[2]))
    overlay = TenantOverlay(weights={"a": 1.0}, unit="session", isolated=True)
    (found,) = overlay.rows(sample(path))
    assert (found.hash_ids, found.output_hash_ids) == ((0,), (1,))


def test_a_row_without_a_session_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", header(), row(0, [1], session_id="s"), row(1, [1]))
    overlay = TenantOverlay(weights={"a": 1.0}, unit="session")
    with pytest.raises(TraceError, match="t:3: the row has no session_id"):
        list(overlay.rows(sample(path)))


def test_servegen_clients_weigh_what_they_send(tmp_path: Path) -> None:
    idle = "0,0,0,,0,0"
    write_lines(tmp_path / "chunk-0-trace.csv", idle, "600,2.5,1.2,Gamma,0.7,0.6")
    write_lines(tmp_path / "chunk-10-trace.csv", "0,1,1,Weibull,1,1", "600,3,1,Gamma,1,1")
    write_lines(tmp_path / "chunk-2-trace.csv", idle)
    weights = servegen_weights(tmp_path)
    assert weights == {"client-0": 1500.0, "client-10": 2400.0}
    assert largest(weights, 1) == {"client-10": 2400.0}


def test_a_servegen_folder_must_have_clients(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no ServeGen client here"):
        servegen_weights(tmp_path)
    path = write_lines(tmp_path / "chunk-0-trace.csv", "0,fast,0,,0,0")
    with pytest.raises(TraceError, match=f"{path.name}:1: rate: could not convert"):
        servegen_weights(tmp_path)

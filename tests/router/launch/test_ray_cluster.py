"""A cluster that cannot be joined is said in one line, with the remedy and at once."""

from __future__ import annotations

import sys

import pytest

from kvindex.foundation.errors import ConfigError, DependencyError
from router.launch.config import load_fleet_config
from router.launch.doctor import examine
from router.launch.ports import any_free_port
from router.launch.ray_cluster import joined


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"run 'pip install prefixfleet\[ray\]'"), joined():
        pass


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local", ":6379", "head:port"])
def test_what_is_no_address_of_a_cluster_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as caught, joined():
        pass
    assert str(caught.value) == (
        f"RAY_ADDRESS={address}: expected HOST:PORT of a cluster that this machine is a node of, "
        "by `ray start --address=HOST:PORT`"
    )


def test_an_address_where_nobody_listens_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    address = f"127.0.0.1:{any_free_port('127.0.0.1')}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(DependencyError) as caught, joined():
        pass
    assert str(caught.value) == (
        f"no Ray cluster at {address}: [Errno 111] Connection refused; start one with "
        "`ray start --head`, or name one with RAY_ADDRESS=HOST:PORT"
    )


def test_doctor_looks_for_the_cluster_that_the_configuration_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")

    def findings(launcher: str) -> list[tuple[str, str]]:
        config = load_fleet_config(None, {"fleet.launcher": launcher})
        return [(one.status, one.detail) for one in examine(config) if one.check == "ray"]

    assert findings("local") == []
    assert findings("ray") == [
        (
            "failed",
            "RAY_ADDRESS=nowhere: expected HOST:PORT of a cluster that this machine is a node of, "
            "by `ray start --address=HOST:PORT`",
        )
    ]

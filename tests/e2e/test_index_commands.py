"""`prefixfleet index …` on a running fleet: it sees, proves, repairs and explains the index."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from tests.e2e.fleet_process import FleetProcess, until

pytestmark = pytest.mark.slow

PROMPT = [(7 * i) % 250 for i in range(320)]


@pytest.fixture(scope="module")
def used_fleet(fleet: FleetProcess) -> FleetProcess:
    """A fleet that has served one prompt of 20 blocks, and whose index has caught up."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    assert fleet.post("/v1/completions", body).status == 200
    until(lambda: num_blocks(fleet) == 20, "20 blocks in the index")
    return fleet


def run(fleet: FleetProcess, *words: str, code: int = 0) -> Any:
    done = fleet.command("index", *words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def num_blocks(fleet: FleetProcess) -> int:
    return sum(row["blocks"] for row in run(fleet, "status")["targets"])


def lose_one_block(fleet: FleetProcess) -> None:
    """Take a block out of the index behind everybody's back."""
    client = redis.Redis.from_url(fleet.file.redis.url)
    bucket = next(iter(client.scan_iter("pf:*:held:*")))
    assert client.spop(bucket) is not None


def verdicts(fleet: FleetProcess, *, code: int) -> dict[str, str]:
    return {row["replica"]: row["verdict"] for row in run(fleet, "verify", code=code)["replicas"]}


def test_verify_finds_a_difference_and_rebuild_repairs_it(used_fleet: FleetProcess) -> None:
    assert verdicts(used_fleet, code=0) == {"replica-0": "equal", "replica-1": "equal"}
    lose_one_block(used_fleet)
    (different,) = [
        row
        for row in run(used_fleet, "verify", code=1)["replicas"]
        if row["verdict"] == "different"
    ]
    assert (different["num_pool_blocks"], different["num_surplus"]) == (20, 1)
    assert len(different["missing"]) == 1
    shown = used_fleet.command("index", "verify")
    assert f"{different['replica']}: the index lacks {different['missing'][0]}" in shown.stdout
    rebuilt = run(used_fleet, "rebuild", different["replica"])["replicas"]
    assert rebuilt == [{"replica": different["replica"], "blocks": 20, "error": None}]
    assert verdicts(used_fleet, code=0) == {"replica-0": "equal", "replica-1": "equal"}


def test_rebuild_of_an_unknown_replica_names_the_known_ones(used_fleet: FleetProcess) -> None:
    done = used_fleet.command("index", "rebuild", "replica-9")
    assert done.returncode == 2
    assert "unknown replica 'replica-9'" in done.stderr
    assert "Known: replica-0, replica-1" in done.stderr


def test_explain_shows_who_holds_a_prompt_and_where_it_diverges(used_fleet: FleetProcess) -> None:
    longer = ",".join(map(str, [*PROMPT, *range(65, 81)]))
    found = run(used_fleet, "explain", "--ids", longer, "--tenant", "acme")
    assert (found["num_tokens"], found["num_blocks"], found["block_size"]) == (336, 21, 16)
    by_matched = {row["matched_blocks"]: row for row in found["targets"]}
    assert sorted(by_matched) == [0, 20]
    assert by_matched[20]["diverges_at_token"] == 320
    assert by_matched[0]["diverges_at_token"] == 0
    assert by_matched[20]["mode"] == "EXACT"
    stranger = run(used_fleet, "explain", "--ids", longer, "--tenant", "globex")
    assert {row["matched_blocks"] for row in stranger["targets"]} == {0}


def test_explain_tells_what_it_needs(used_fleet: FleetProcess) -> None:
    neither = used_fleet.command("index", "explain")
    assert (neither.returncode, neither.stdout) == (2, "")
    assert "give a prompt, or --ids with token ids" in neither.stderr
    no_tenant = used_fleet.command("index", "explain", "hello")
    assert no_tenant.returncode == 2
    assert "tenant: name one of acme, globex" in no_tenant.stderr
    as_text = used_fleet.command("index", "explain", "hello", "--tenant", "acme")
    assert as_text.returncode == 0, as_text.stderr
    assert "full blocks of 16; tenant acme, model tiny" in as_text.stdout


def test_watch_shows_the_same_as_status_as_often_as_asked(used_fleet: FleetProcess) -> None:
    done = used_fleet.command("index", "watch", "--count", "2", "--interval", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert [row["target"] for row in lines[1]["targets"]] == ["replica-0/0", "replica-1/0"]

"""A real vLLM and a replica of ours behind one gateway: both predicted exactly.

`make test-interop` runs this; docs/interop.md says what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.launch.model_folder import prepare_model
from tests.e2e.fleet_process import FleetProcess, until
from tests.interop.vllm_process import BLOCK_SIZE, VARIABLE, VllmProcess, vllm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        vllm_python() is None, reason=f"{VARIABLE} names no interpreter with vllm installed"
    ),
]

MODEL = "smollm2"
WORDS = ("river", "stone", "light", "harbour", "winter", "copper", "signal", "meadow", "engine")
NUM_PROMPTS = 6


@dataclass
class Answer:
    """Where a request went, and what was predicted and realised of its prefix, in tokens."""

    replica: str
    predicted: int
    realised: int
    prompt_tokens: int


@dataclass
class Mixed:
    """One gateway before a vLLM called `stock` and a replica of ours called `replica-0`."""

    fleet: FleetProcess
    vllm: VllmProcess

    def send(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a request to the gateway."""
        reply = self.fleet.post(path, {"model": MODEL, "max_tokens": 2, **body})
        assert reply.status == 200, reply
        usage = reply.body["usage"]
        return Answer(
            reply.headers["x-prefixfleet-replica"],
            int(reply.headers["x-prefixfleet-cached-tokens-predicted"]),
            usage["prompt_tokens_details"]["cached_tokens"] or 0,
            usage["prompt_tokens"],
        )

    def send_at_once(self, path: str, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Send new prompts together, so that load spreads them; none finds more than a trifle.

        Conversations share the template's system prompt: less than one block of the vLLM.
        """
        with ThreadPoolExecutor(len(bodies)) as threads:
            answers = list(threads.map(lambda body: self.send(path, body), bodies))
        assert all(a.predicted < BLOCK_SIZE > a.realised for a in answers), answers
        return answers

    def replica(self, replica_id: str) -> dict[str, Any]:
        """Return a replica as the gateway lists it."""
        listed = self.fleet.admin("/admin/replicas").body["replicas"]
        found: dict[str, Any] = next(r for r in listed if r["id"] == replica_id)
        return found

    def settles(self, replica_id: str, num_blocks: int) -> None:
        """Wait until a replica is EXACT and the index holds at least so many of its blocks."""

        def reached() -> bool:
            found = self.replica(replica_id)
            blocks = found["num_blocks"] or {}
            return bool(found["mode"] == "EXACT" and blocks.get("gpu", 0) >= num_blocks)

        until(reached, f"{replica_id} is EXACT and holds {num_blocks} blocks")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("interop")
    model = prepare_model("demo", dtype="auto", cache_dir=None, say=print)
    vllm = VllmProcess(folder, Path(model.folder), served_name=MODEL)
    config = {
        "fleet": {"replicas": 1},
        "worker": {
            "model": "demo",
            "served_model_name": MODEL,
            "port": random.randrange(20000, 30000),
            "num_threads": 1,
        },
        "router": {
            "port": 0,
            "admin_port": 0,
            "replicas": [{"url": vllm.url, "kind": "vllm", "name": "stock", "events": "auto"}],
        },
        "tenants": [{"name": "acme"}],
    }
    fleet = FleetProcess(folder / "fleet", config)
    try:
        vllm.start()
        mixed = Mixed(fleet.start(), vllm)
        mixed.settles("stock", 0)
        mixed.settles("replica-0", 0)
        yield mixed
    finally:
        fleet.kill()
        vllm.stop()


def story(seed: int) -> str:
    """Return some 300 words that no other seed begins with."""
    source = random.Random(seed)
    return f"Story {seed}. " + " ".join(source.choice(WORDS) for _ in range(300))


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.fault("router-15")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prefix_returns_to_whoever_holds_it_and_its_length_is_foretold(
    mixed: Mixed, path: str
) -> None:
    kind = len(path)

    def body(seed: int, tail: str) -> dict[str, Any]:
        text = story(1000 * kind + seed)
        return chat(text + tail) if "chat" in path else {"prompt": text + tail}

    first = mixed.send_at_once(path, [body(i, " What happens?") for i in range(NUM_PROMPTS)])
    assert {answer.replica for answer in first} == {"stock", "replica-0"}
    for replica, block in (("stock", BLOCK_SIZE), ("replica-0", 16)):
        here = [answer for answer in first if answer.replica == replica]
        num_blocks = sum(answer.prompt_tokens // block * (block // 16) for answer in here)
        # The first 16 tokens of every conversation are one block of the pool.
        mixed.settles(replica, num_blocks - (len(here) - 1 if "chat" in path else 0))
    for i, before in enumerate(first):
        again = mixed.send(path, body(i, " And who is in it?"))
        assert again.replica == before.replica
        assert again.predicted == again.realised > 256
        assert again.predicted % (BLOCK_SIZE if again.replica == "stock" else 16) == 0


def test_the_index_commands_show_it_like_any_other_replica(mixed: Mixed) -> None:
    shown = mixed.fleet.command("index", "status")
    assert shown.returncode == 0, shown.stderr
    row = next(line for line in shown.stdout.splitlines() if "stock/0" in line)
    assert " EXACT " in row


@pytest.mark.fault("router-1")
def test_a_killed_vllm_leaves_nothing_behind_and_comes_back_empty(mixed: Mixed) -> None:
    body = chat(story(77))
    until(lambda: mixed.send("/v1/chat/completions", body).realised > 0, "the prefix is cached")
    mixed.vllm.restart()
    mixed.settles("stock", 0)
    until(
        lambda: (mixed.replica("stock")["num_blocks"] or {}).get("gpu", 0) == 0,
        "the blocks of the old process are gone",
    )
    fresh = [chat(story(500 + i)) for i in range(NUM_PROMPTS)]
    answers = mixed.send_at_once("/v1/chat/completions", fresh)
    assert {answer.replica for answer in answers} == {"stock", "replica-0"}

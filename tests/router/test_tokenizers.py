"""Tokenizers that replicas hand over: kept on disk, checked, and not indispensable."""

from __future__ import annotations

from pathlib import Path

from tests.router.fake_replica import FakeReplica
from tests.router.running_gateway import chat, completion, gateway_spec, running_gateway

LONG = chat("a long enough prompt to have several blocks in the cache " * 4)


async def test_a_bundle_is_kept_on_disk_for_the_next_start(tmp_path: Path) -> None:
    spec = gateway_spec(cache_dir=str(tmp_path))
    async with running_gateway(spec, replicas=1) as running:
        await running.post("/v1/completions", completion("x"))
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1
    async with running_gateway(spec, replicas=0) as running:
        replica = FakeReplica("r0")
        replica.gives_tokenizer = False
        await running.add(replica)
        await running.post("/v1/completions", completion("hi"))
        assert replica.bodies[-1]["prefixfleet"]["prompt_token_ids"] is not None


async def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    spec = gateway_spec(cache_dir=str(tmp_path))
    for damage in (False, True):
        if damage:
            (file,) = (tmp_path / "tokenizers").iterdir()
            file.write_bytes(b"damaged")
        async with running_gateway(spec, replicas=1) as running:
            _, _, _ = await running.post("/v1/chat/completions", LONG)
            _, _, headers = await running.post("/v1/chat/completions", LONG)
            assert headers["x-prefixfleet-cached-tokens-predicted"] != "0"


async def test_a_bundle_that_is_not_the_registered_one_is_not_used_and_requests_still_served() -> (
    None
):
    async with running_gateway(replicas=0) as running:
        replica = FakeReplica("r0")
        replica.gives_tokenizer = False
        await running.add(replica)
        status, _, headers = await running.post("/v1/chat/completions", LONG)
        assert (status, headers["x-prefixfleet-cached-tokens-predicted"]) == (200, "0")
        assert "prompt_token_ids" not in replica.bodies[-1]["prefixfleet"] or (
            replica.bodies[-1]["prefixfleet"]["prompt_token_ids"] is None
        )
        bad = chat("x", temperature=9)
        status, answer, _ = await running.post("/v1/chat/completions", bad)
        assert (status, answer["error"]["param"]) == (400, "temperature")

"""Placement in FALLBACK: by what this gateway has had computed where, for a while."""

from __future__ import annotations

import pytest

from kvindex.index import Target
from router.fleet.history import OwnHistory
from router.request.text_chain import BLOCK_BYTES, text_chain
from tests.conditions import until
from tests.contracts.index_subject import A, B, chain
from tests.router.running_gateway import Running, chat, completion, running_gateway
from tests.router.test_static_replicas import in_front_of

TEXT = "The quick brown fox jumps over the lazy dog, again and again and again. " * 12


def test_a_chain_is_remembered_for_the_target_that_computed_it() -> None:
    history, x = OwnHistory(), chain(10)
    history.note(A, x[:6], now=0)
    assert history.matched_blocks(A, x, now=1) == 6
    assert history.matched_blocks(A, x[:3], now=1) == 3
    assert history.matched_blocks(A, chain(10, "y"), now=1) == 0
    assert history.matched_blocks(B, x, now=1) == 0


def test_what_is_too_old_is_not_believed() -> None:
    history, x = OwnHistory(ttl_s=300), chain(10)
    history.note(A, x, now=0)
    history.note(A, x[:4], now=200)
    assert [history.matched_blocks(A, x, now=now) for now in (300, 301, 500, 501)] == [10, 4, 4, 0]


@pytest.mark.fault("router-30")
@pytest.mark.fault("router-33")
def test_the_end_of_the_oldest_chain_makes_room_first() -> None:
    history, x, y = OwnHistory(max_blocks=10), chain(8, "x"), chain(6, "y")
    history.note(A, x, now=0)
    history.note(A, y, now=1)
    assert history.matched_blocks(A, y, now=1) == 6
    assert history.matched_blocks(A, x, now=1) == 4
    for i in range(1000):
        history.note(A, chain(3, f"z{i}"), now=2)
    assert history.matched_blocks(A, x, now=2) == 0


def test_a_replica_is_forgotten_with_all_its_ranks() -> None:
    history, x = OwnHistory(), chain(3)
    for rank in (0, 1):
        history.note(Target("a", rank), x, now=0)
    history.note(B, x, now=0)
    history.forget("a")
    assert [history.matched_blocks(Target("a", rank), x, now=0) for rank in (0, 1)] == [0, 0]
    assert history.matched_blocks(B, x, now=0) == 3


def test_texts_share_the_blocks_of_their_common_beginning_under_one_salt() -> None:
    left = text_chain(b"a" * 2 * BLOCK_BYTES + b"b" * BLOCK_BYTES, cache_salt="s")
    right = text_chain(b"a" * 2 * BLOCK_BYTES + b"c" * BLOCK_BYTES + b"tail", cache_salt="s")
    assert len(left) == len(right) == 3
    assert left[:2] == right[:2]
    assert left[2] != right[2]
    assert not set(left) & set(text_chain(b"a" * 3 * BLOCK_BYTES, cache_salt="t"))
    assert text_chain(b"a" * (BLOCK_BYTES - 1), cache_salt="s") == ()


async def places(running: Running, path: str, texts: list[str]) -> list[tuple[str, str, int]]:
    """Send texts one after the other; return replica, mode and predicted tokens of each."""
    found = []
    for text in texts:
        body = chat(text) if "chat" in path else completion(text)
        status, _, headers = await running.post(path, body)
        assert status == 200
        predicted = int(headers["x-prefixfleet-cached-tokens-predicted"])
        found.append((headers["x-prefixfleet-replica"], headers["x-prefixfleet-mode"], predicted))
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompts_return_to_stock_engines_that_publish_nothing(path: str) -> None:
    async with in_front_of("vllm", "openai", "auto") as running:
        texts = [f"{i} {TEXT}" for i in range(9)]
        first = await places(running, path, texts)
        assert {replica for replica, _, _ in first} == {"e0", "e1", "e2"}
        assert {(mode, predicted) for _, mode, predicted in first} == {("FALLBACK", 0)}
        again = await places(running, path, [f"{text} And then?" for text in texts])
        assert [replica for replica, _, _ in again] == [replica for replica, _, _ in first]
        assert {mode for _, mode, _ in again} == {"FALLBACK"}
        assert all(predicted > 128 for _, _, predicted in again)


async def test_an_engine_that_went_away_owes_nothing_when_it_is_back() -> None:
    async with in_front_of("vllm") as running:
        path, (engine,) = "/v1/completions", running.replicas
        await places(running, path, [TEXT])
        view = running.gateway.view
        port = engine.url
        await engine.stop()
        await until(lambda: not view.replicas[0].live)
        await engine.start(port=int(port.rpartition(":")[2]))
        await until(lambda: view.replicas[0].live)
        ((_, _, predicted),) = await places(running, path, [TEXT])
        assert predicted == 0


async def test_while_the_index_is_away_prompts_return_to_where_they_were_computed() -> None:
    async with running_gateway(replicas=3) as running:
        path, texts = "/v1/completions", [f"{i} {TEXT[:300]}" for i in range(9)]
        first = await places(running, path, texts)
        assert {mode for _, mode, _ in first} == {"EXACT"}
        running.stores.down = True
        await until(lambda: not running.gateway.view.index_is_up)
        again = await places(running, path, texts)
        assert [replica for replica, _, _ in again] == [replica for replica, _, _ in first]
        assert {mode for _, mode, _ in again} == {"FALLBACK"}
        assert all(predicted > 100 for _, _, predicted in again)
        running.stores.down = False
        await until(lambda: running.gateway.view.index_is_up)
        back = await places(running, path, texts)
        assert {mode for _, mode, _ in back} == {"EXACT"}


async def test_a_reset_cache_is_not_believed_in_any_more() -> None:
    async with running_gateway(replicas=1) as running:
        path = "/v1/completions"
        await places(running, path, [TEXT[:300]])
        running.stores.down = True
        await until(lambda: not running.gateway.view.index_is_up)
        ((_, _, before),) = await places(running, path, [TEXT[:300]])
        assert before > 100
        running.stores.down = False
        await until(lambda: running.gateway.view.index_is_up)
        await running.admin("/admin/replicas/r0/reset_prefix_cache", method="POST")
        running.stores.down = True
        await until(lambda: not running.gateway.view.index_is_up)
        ((_, mode, after),) = await places(running, path, [TEXT[:300]])
        assert (mode, after) == ("FALLBACK", 0)

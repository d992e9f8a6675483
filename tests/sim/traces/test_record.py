"""A recording proxy changes nothing of what passes, and its trace holds no text."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer

from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError
from sim.traces.keyed_blocks import KeyedBlocks
from sim.traces.output_tally import OutputTally
from sim.traces.record import recording_app
from sim.traces.recording import Recording
from sim.traces.row import TraceRow
from sim.traces.trace import open_trace
from sim.traces.writer import TraceWriter
from tests.conditions import until
from tests.engine.frontend.tiny_tokenizer import tiny_bundle

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are a patient librarian of a very large library. " * 4}


def chat(*turns: str, **fields: object) -> dict[str, object]:
    users = [{"role": "user", "content": turn} for turn in turns]
    return {"model": "m", "messages": [SYSTEM, *users], **fields}


class Upstream:
    """A server that answers as it is told, and remembers what reached it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, bytes]] = []
        self.held = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.path_qs, request.headers.get("Authorization"), body))
        if request.path == "/v1/models":
            return web.json_response({"data": []}, headers={"X-Kept": "yes"})
        fields = json.loads(body)
        if fields.get("refuse"):
            return web.json_response({"error": {"message": "slow down"}}, status=429)
        if fields.get("stream"):
            return await self._stream(request, fields)
        return web.json_response({"choices": [{}], "usage": {"completion_tokens": 7}})

    async def _stream(self, request: web.Request, fields: dict[str, object]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in ("one", "two", "three"):
            chunk = {"choices": [{"delta": {"content": word}}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if fields.get("hold"):
            await self.held.wait()
        if fields.get("break"):
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


class Recorder:
    """The proxy between a client and an upstream, and the trace that it wrote."""

    def __init__(self, folder: Path, upstream: Upstream) -> None:
        self.upstream = upstream
        self.path = folder / "trace.jsonl"
        self.blocks = KeyedBlocks(block_size=4)
        self.url = ""
        self.client = ClientSession()

    async def post(self, body: object, path: str = CHAT, key: str = "sk-a") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    def rows(self) -> list[TraceRow]:
        return list(open_trace(self.path).rows())

    async def rows_once(self, count: int) -> list[TraceRow]:
        await until(lambda: self.path.exists() and len(self.rows()) >= count)
        return self.rows()


@pytest.fixture
async def recorder(tmp_path: Path) -> AsyncIterator[Recorder]:
    upstream = Upstream()
    behind = web.Application()
    behind.router.add_route("*", "/{path:.*}", upstream.answer)
    found = Recorder(tmp_path, upstream)
    recording = Recording(TraceWriter(found.path, found.blocks.header()), found.blocks)
    async with TestServer(behind) as server:
        app = recording_app(recording, upstream=str(server.make_url("/")))
        async with TestServer(app) as proxy, found.client:
            found.url = str(proxy.make_url("")).rstrip("/")
            yield found
            upstream.held.set()
    recording.close()


async def test_what_is_not_a_completion_passes_unrecorded(recorder: Recorder) -> None:
    async with recorder.client.get(f"{recorder.url}/v1/models?a=%2Fb") as response:
        assert (response.status, response.headers["X-Kept"]) == (200, "yes")
        assert await response.json() == {"data": []}
    assert recorder.upstream.requests == [("/v1/models?a=/b", None, b"")]
    assert recorder.rows() == []


async def test_a_conversation_becomes_rows_that_share_their_prefix(recorder: Recorder) -> None:
    first, second = chat("hello", cache_salt="s1"), chat("hello", "and more")
    assert (await recorder.post(first))[0] == 200
    assert (await recorder.post(second, key="sk-b"))[0] == 200
    assert (await recorder.post(first, key="sk-b"))[0] == 200
    rows = await recorder.rows_once(3)
    assert [row.tenant for row in rows] == ["key-1", "key-2", "key-2"]
    assert [row.client_salt for row in rows] == ["salt-1", None, "salt-1"]
    assert [(row.output_length, row.outcome) for row in rows] == [(7, "answered")] * 3
    ids = [row.hash_ids or () for row in rows]
    assert ids[0] == ids[2]
    num_shared = sum(a == b for a, b in zip(ids[0], ids[1], strict=False))
    assert len(ids[0]) - 2 <= num_shared < len(ids[1])
    assert recorder.upstream.requests[0][1] == "Bearer sk-a"
    assert json.loads(recorder.upstream.requests[1][2]) == second


async def test_no_text_and_no_key_is_written(recorder: Recorder) -> None:
    await recorder.post(chat("a secret", prompt_cache_key="alice", cache_salt="pepper"))
    (row,) = await recorder.rows_once(1)
    assert (row.session_id, row.model) == ("session-1", "m")
    text = recorder.path.read_text()
    assert not any(word in text for word in ("secret", "alice", "pepper", "sk-a", "librarian"))


async def test_a_stream_passes_piece_by_piece_and_is_counted(recorder: Recorder) -> None:
    body = chat("x", stream=True, hold=True)
    async with recorder.client.post(recorder.url + CHAT, json=body) as response:
        assert response.content_type == "text/event-stream"
        assert b'"one"' in await response.content.readline()
        recorder.upstream.held.set()
        rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    (row,) = await recorder.rows_once(1)
    assert (row.output_length, row.outcome, row.tenant) == (3, "answered", None)


async def test_refusals_are_recorded(recorder: Recorder) -> None:
    assert (await recorder.post(chat("x", refuse=True)))[0] == 429
    (row,) = await recorder.rows_once(1)
    assert (row.outcome, row.output_length) == ("refused", 0)
    assert row.hash_ids


async def test_an_answer_that_breaks_off_breaks_off(recorder: Recorder) -> None:
    body = chat("x", **{"stream": True, "break": True})
    with pytest.raises(ClientPayloadError):
        await recorder.post(body)
    (row,) = await recorder.rows_once(1)
    assert (row.outcome, row.output_length) == ("failed", 3)


async def test_a_client_that_leaves_is_recorded_as_gone(recorder: Recorder) -> None:
    body = chat("x", stream=True, hold=True)
    async with recorder.client.post(recorder.url + CHAT, json=body) as response:
        await response.content.readline()
    (row,) = await recorder.rows_once(1)
    assert row.outcome == "cancelled"


async def test_an_open_request_holds_back_later_rows(recorder: Recorder) -> None:
    body = chat("slow", stream=True, hold=True)
    async with recorder.client.post(recorder.url + CHAT, json=body) as response:
        await response.content.readline()
        assert (await recorder.post(chat("fast")))[0] == 200
        assert recorder.rows() == []
        recorder.upstream.held.set()
        await response.read()
    rows = await recorder.rows_once(2)
    assert [row.output_length for row in rows] == [3, 7]


async def test_a_body_without_a_prompt_passes_and_leaves_no_row(recorder: Recorder) -> None:
    assert (await recorder.post({"model": "m", "messages": "none"}))[0] == 200
    assert (await recorder.post({"model": "m"}))[0] == 200
    assert (await recorder.post(chat("x")))[0] == 200
    assert len(await recorder.rows_once(1)) == 1


async def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    blocks = KeyedBlocks(block_size=4)
    recording = Recording(TraceWriter(path, blocks.header()), blocks)
    app = recording_app(recording, upstream="http://127.0.0.1:9")
    async with TestServer(app) as proxy, ClientSession() as client:
        async with client.post(proxy.make_url(CHAT), json=chat("x")) as response:
            assert response.status == 502
            error = (await response.json())["error"]
        assert error["message"].startswith("the server at http://127.0.0.1:9 cannot be reached")
    recording.close()
    assert [row.outcome for row in open_trace(path).rows()] == ["failed"]


@pytest.mark.slow
def test_a_signal_ends_the_recording_with_a_whole_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "t.jsonl.gz"
    words = ["--listen", f"127.0.0.1:{port}", "--upstream", "http://127.0.0.1:9", "-o", str(path)]
    command = [sys.executable, "-m", "router.cli", "trace", "record", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        body = json.dumps({"model": "m", "prompt": "x" * 640}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"

        def refused() -> bool:
            try:
                urllib.request.urlopen(urllib.request.Request(url, data=body))
            except urllib.error.HTTPError as error:
                return error.code == 502
            except OSError:
                return False
            return False

        asyncio.run(until(refused, seconds=20))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, f"{path}: 1 requests\n")
    assert [len(row.hash_ids or ()) for row in open_trace(path).rows()] == [10]


@pytest.mark.parametrize("upstream", ["localhost:8000", "http://localhost:8000/v1/"])
def test_an_upstream_is_the_root_of_a_server(tmp_path: Path, upstream: str) -> None:
    blocks = KeyedBlocks(block_size=4)
    recording = Recording(TraceWriter(tmp_path / "t", blocks.header()), blocks)
    with pytest.raises(ConfigError, match="expected the server's root"):
        recording_app(recording, upstream=upstream)
    recording.close()


def test_with_a_tokenizer_lengths_are_exact() -> None:
    prompts = PromptEncoder(tiny_bundle(), clock=SystemClock(), max_model_len=4096)
    blocks = KeyedBlocks(block_size=4, prompts=prompts)
    body = json.dumps({"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}).encode()
    (prompt,) = blocks.prompts_of(body)
    assert (prompt.input_length, len(prompt.hash_ids)) == (9, 2)
    assert blocks.header().lengths == "exact"


def test_one_body_may_hold_several_prompts() -> None:
    blocks = KeyedBlocks(block_size=1)

    def lengths(prompt: object) -> list[int]:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return [found.input_length for found in blocks.prompts_of(body)]

    assert lengths("8 bytes.") == [2]
    assert lengths(["8 bytes.", "4444"]) == [2, 1]
    assert lengths([5, 6, 7]) == [3]
    assert lengths([[5, 6], [7]]) == [2, 1]


def test_ids_of_two_recordings_have_nothing_in_common() -> None:
    body = json.dumps(chat("hello")).encode()
    (first,), (second,) = (KeyedBlocks(block_size=4).prompts_of(body) for _ in range(2))
    assert first.input_length == second.input_length
    assert not set(first.hash_ids) & set(second.hash_ids)
    same_key = [KeyedBlocks(block_size=4, key=bytes(32)).prompts_of(body) for _ in range(2)]
    assert same_key[0] == same_key[1]


def test_usage_outranks_the_number_of_chunks() -> None:
    tally = OutputTally(streamed=True)
    tally.feed(b'data: {"choices":[{"text":"a"}]}\n\nda')
    tally.feed(b'ta: {"choices":[{"text":""}]}\n\n')
    assert tally.num_tokens() == 1
    tally.feed(b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n')
    assert tally.num_tokens() == 5

"""Engines that answer at once, for what is measured in front of them: about 10 us of CPU a request.

    python -m benchmarks.fake_engine --ports 9001 9002

Each port is one replica. Every POST gets the same answer, or the same stream when it says
`"stream":true`: at once, or one chunk at a time if `user` is "pace-MS-CHUNKS". Who asks for
`return_token_ids` gets chunks as replicas of ours write them, and by a `stream_interval` fewer. It
neither checks nor computes anything, and speaks just enough HTTP/1.1 for routers and clients.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
from typing import Any, cast

import uvloop

MODEL = "smollm2"
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_PACE = re.compile(rb'"user"\s*:\s*"pace-(\d+)-(\d+)"')
_OURS = b'"return_token_ids":true'
_INTERVAL = re.compile(rb'"stream_interval":(\d+)')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_NUM_PROMPT_TOKENS = 512
_NUM_CHUNKS = 16


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


def _piece(data: bytes) -> bytes:
    """Frame one server-sent event as one chunk of the transfer encoding."""
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class Answers:
    """Every answer, composed once."""

    def __init__(self, num_chunks: int) -> None:
        usage = {
            "prompt_tokens": _NUM_PROMPT_TOKENS,
            "completion_tokens": num_chunks,
            "total_tokens": _NUM_PROMPT_TOKENS + num_chunks,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        base = {"id": "fake-1", "created": 1, "model": MODEL}
        message = {"role": "assistant", "content": "token " * num_chunks}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.whole = _whole(
            _json({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        )
        self._chunk = {**base, "object": "chat.completion.chunk"}
        self._last = _piece(_json({**self._chunk, "choices": [], "usage": usage}))
        self._num_tokens = num_chunks
        self._streams: dict[tuple[bool, int], list[bytes]] = {}
        self.end = _piece(b"[DONE]") + b"0\r\n\r\n"
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "fake"}
        info = {
            "model_path": MODEL,
            "served_model_name": MODEL,
            "is_generation": True,
            "tp_size": 1,
            "dp_size": 1,
        }
        self.others = {
            b"/v1/models": _whole(_json({"object": "list", "data": [card]})),
            b"/get_model_info": _whole(_json(info)),
            b"/model_info": _whole(_json(info)),
            b"/get_server_info": _whole(_json(info)),
            b"/server_info": _whole(_json(info)),
            b"/version": _whole(b'{"version":"0.32.0"}'),
            b"/get_load": _whole(b'[{"load":0}]'),
        }

    def stream(self, *, ours: bool, interval: int) -> list[bytes]:
        """Return the chunks of a stream; `ours` are for a gateway of ours, and end with usage."""
        pieces = self._streams.get((ours, interval))
        if pieces is None:
            starts = [0, *range(1, self._num_tokens, interval), self._num_tokens]
            runs = itertools.pairwise(starts)
            pieces = [_piece(_json(self._tokens(*run, ours=ours))) for run in runs]
            pieces += [self._last] if ours else []
            self._streams[ours, interval] = pieces
        return pieces

    def _tokens(self, start: int, end: int, *, ours: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": "token " * (end - start)}
        if start == 0:
            delta["role"] = "assistant"
        finish = "stop" if end == self._num_tokens else None
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {**self._chunk, "choices": [choice]}
        if ours:
            ids = [*range(start + 1, end + 1)]
            progress = {"choice": 0, "token_ids": ids, "text_length": 6 * end}
            chunk |= {"usage": None, "prefixfleet": progress}
        return chunk


class Connection(asyncio.Protocol):
    """One connection; requests are answered in order."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._buffer = b""
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; uvloop's is no subclass of asyncio.Transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop a stream that nobody reads any more."""
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._buffer += data
        while self._streaming is None and self._answer_next():
            continue

    def _answer_next(self) -> bool:
        """Answer one request of the buffer; False when none is complete."""
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return False
        head, start = self._buffer[:head_end], head_end + 4
        length = _LENGTH.search(head)
        end = start + int(length[1]) if length else start
        if _CHUNKED.search(head):
            last = self._buffer.find(b"0\r\n\r\n", start)
            end = last + 5 if last >= 0 else len(self._buffer) + 1
        if len(self._buffer) < end:
            return False
        body, self._buffer = self._buffer[start:end], self._buffer[end:]
        method, path = head.split(b" ", 2)[:2]
        if method == b"PRI":  # HTTP/2 with prior knowledge
            self._transport.close()
        elif method != b"POST":
            path = path.partition(b"?")[0]
            self._transport.write(self._answers.others.get(path, _whole(b"{}")))
        elif _STREAM.search(body):
            asked = _INTERVAL.search(body)
            pieces = self._answers.stream(
                ours=_OURS in body, interval=int(asked[1]) if asked else 1
            )
            self._stream(pieces, _PACE.search(body))
        else:
            self._transport.write(self._answers.whole)
        return True

    def _stream(self, pieces: list[bytes], pace: re.Match[bytes] | None) -> None:
        if pace is None:
            self._transport.write(_STREAM_HEAD + b"".join(pieces) + self._answers.end)
            return
        loop, interval_s = asyncio.get_running_loop(), int(pace[1]) / 1e3
        self._streaming = loop.create_task(self._paced(pieces, interval_s, int(pace[2])))

    async def _paced(self, pieces: list[bytes], interval_s: float, num_chunks: int) -> None:
        """Write chunk by chunk, the usual last ones last, then go on with what has arrived."""
        last = pieces[_NUM_CHUNKS - 1 :]
        self._transport.write(_STREAM_HEAD)
        for _ in range(num_chunks - 1):
            self._transport.write(pieces[1])
            await asyncio.sleep(interval_s)
        self._transport.write(b"".join(last) + self._answers.end)
        self._streaming = None
        self.data_received(b"")


async def serve(ports: list[int]) -> None:
    """Listen on every port until cancelled."""
    loop, answers = asyncio.get_running_loop(), Answers(_NUM_CHUNKS)
    for port in ports:
        await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", nargs="+", type=int, required=True)
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()

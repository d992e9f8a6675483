"""`prefixfleet trace record`: a proxy that changes nothing and writes a trace of what passes.

It stands before any OpenAI-compatible server. Requests and answers pass as they are, streams piece
by piece; only completions and chat completions are recorded, as lengths and keyed ids, without
text. It routes nothing, retries nothing and checks no key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict
from yarl import URL

from engine.frontend.errors import RequestError
from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError, DependencyError
from sim.traces.command import load_prompts, positive
from sim.traces.keyed_blocks import KeyedBlocks
from sim.traces.output_tally import OutputTally
from sim.traces.recording import RecordedRequest, Recording, RequestHints
from sim.traces.row import Outcome
from sim.traces.writer import TraceWriter

RECORDED_PATHS = ("/chat/completions", "/completions")
DEFAULT_BLOCK_SIZE = 16
MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 10.0
_BAD_GATEWAY, _CLIENT_ERRORS, _SERVER_ERRORS = 502, 400, 500
# Headers that belong to one connection (RFC 9110, 7.6.1), or that the copy sets anew.
_PER_HOP = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

logger = logging.getLogger("prefixfleet.sim.record")


def record(invocation: Invocation) -> int:
    """Stand before a server until a signal, then finish the trace."""
    parser = CommandParser(invocation, "Record the traffic of any OpenAI-compatible server.")
    parser.add_argument(
        "--listen",
        required=True,
        metavar="[HOST]:PORT",
        help="where to listen; without HOST on all addresses",
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="the server's root")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="trace to write"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the model's folder, for token ids (default: prompts are cut as text)",
    )
    parser.add_argument(
        "--block-size",
        type=positive,
        default=DEFAULT_BLOCK_SIZE,
        metavar="TOKENS",
        help="tokens in a block of the trace",
    )
    flags = parser.read()
    host, port = _listen_address(flags.listen)
    prompts = None if flags.tokenizer is None else load_prompts(flags.tokenizer)
    blocks = KeyedBlocks(block_size=flags.block_size, prompts=prompts)
    with closing(Recording(TraceWriter(flags.output, blocks.header()), blocks)) as recording:
        app = recording_app(recording, upstream=flags.upstream)
        try:
            web.run_app(
                app,
                host=host,
                port=port,
                print=None,
                handler_cancellation=True,
                shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:
            raise DependencyError(f"cannot listen on {flags.listen}: {error.strerror}") from error
    print(f"{flags.output}: {recording.num_rows:,} requests")
    return 0


def _listen_address(text: str) -> tuple[str | None, int]:
    """Read "[HOST]:PORT"; without a host, all addresses of this machine."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"--listen {text}: expected [HOST]:PORT, such as 127.0.0.1:9000")
    return host.strip("[]") or None, int(port)


def recording_app(recording: Recording, *, upstream: str) -> web.Application:
    """Return the proxy as an application; the caller closes the recording."""
    root = upstream.rstrip("/")
    if not root.startswith(("http://", "https://")) or root.endswith("/v1"):
        raise ConfigError(
            f"--upstream {upstream}: expected the server's root, such as http://localhost:8000, "
            "without /v1"
        )
    proxy = RecordingProxy(recording, root)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    app.cleanup_ctx.append(proxy.connections)
    return app


class RecordingProxy:
    """Passes requests on to one server and tells the recording about them."""

    def __init__(self, recording: Recording, upstream: str) -> None:
        self._recording = recording
        self._upstream = upstream
        self._session: ClientSession | None = None
        self._started_at = time.monotonic()

    async def connections(self, app: web.Application) -> AsyncIterator[None]:
        """Hold the connections to the server while the application runs."""
        async with ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
        ) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, recorded if it is one for a completion."""
        arrival_s = time.monotonic() - self._started_at
        if request.method != "POST" or not request.path.endswith(RECORDED_PATHS):
            response, _ = await self._relay(request, await request.read(), None)
            return response
        recorded = self._recording.begin(
            arrival_s=arrival_s,
            api_key=request.headers.get("Authorization"),
            request_id=request.headers.get("X-Request-Id"),
        )
        # What stands if the client leaves: the task is cancelled, or a write to it fails.
        outcome: Outcome = "cancelled"
        try:
            body = await request.read()
            # Beside the answer: who records must not slow down who asks.
            reading = asyncio.create_task(self._read_prompts(recorded, body))
            try:
                response, outcome = await self._relay(request, body, recorded)
            finally:
                await reading
            return response
        finally:
            self._recording.finish(recorded, outcome)

    async def _relay(
        self, request: web.Request, body: bytes, recorded: RecordedRequest | None
    ) -> tuple[web.StreamResponse, Outcome]:
        assert self._session is not None, "the application has not started"
        headers = _end_to_end(request.headers)
        if recorded is not None:
            # A compressed answer could not be counted.
            headers["Accept-Encoding"] = "identity"
        try:
            upstream = await self._session.request(
                request.method,
                URL(self._upstream + request.raw_path, encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
            )
        except (ClientError, TimeoutError) as error:
            return _bad_gateway(self._upstream, error), "failed"
        async with upstream:
            return await self._answer(request, upstream, recorded)

    async def _answer(
        self, request: web.Request, upstream: ClientResponse, recorded: RecordedRequest | None
    ) -> tuple[web.StreamResponse, Outcome]:
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=_end_to_end(upstream.headers)
        )
        response.content_length = upstream.content_length
        tally = OutputTally(streamed=upstream.content_type == "text/event-stream")
        await response.prepare(request)
        outcome = _outcome(upstream.status)
        try:
            async for data in upstream.content.iter_any():
                tally.feed(data)
                await response.write(data)
        except ConnectionResetError:
            raise
        except ClientError as error:
            # The client must see what the server did: an answer that breaks off.
            logger.warning("path=%s the server broke off: %s", request.path, error)
            outcome = "failed"
            if request.transport is not None:
                request.transport.abort()
        finally:
            if recorded is not None:
                recorded.num_output_tokens = tally.num_tokens()
        return response, outcome

    async def _read_prompts(self, recorded: RecordedRequest, body: bytes) -> None:
        """Read what a trace keeps of a body; one that cannot be read leaves no row."""
        try:
            recorded.hints = msgspec.json.decode(body, type=RequestHints)
            recorded.prompts = await asyncio.to_thread(self._recording.blocks.prompts_of, body)
        except (msgspec.DecodeError, RequestError):
            return


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _PER_HOP
    )


def _outcome(status: int) -> Outcome:
    if status >= _SERVER_ERRORS:
        return "failed"
    return "refused" if status >= _CLIENT_ERRORS else "answered"


def _bad_gateway(upstream: str, error: Exception) -> web.Response:
    """Answer in OpenAI's shape for a server that cannot be reached."""
    message = f"the server at {upstream} cannot be reached: {error or type(error).__name__}"
    body = {"error": {"message": message, "type": "api_error", "param": None, "code": None}}
    return web.json_response(body, status=_BAD_GATEWAY)

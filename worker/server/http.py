"""The HTTP manners of a replica: request ids, tokens, bodies and errors in OpenAI's shape.

It knows no endpoint and no engine.
"""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError, envelope
from kvindex.foundation.errors import PrefixFleetError
from worker.server.generation import choose_request_id

_log = logging.getLogger("prefixfleet.replica.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/openapi.json"})
_POLLED_PATHS = frozenset({"/health", "/metrics"})

_KIND_OF_STATUS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
    422: "unprocessable",
}


def json_response(payload: Any, *, status: int = 200) -> web.Response:
    """Answer with a Struct (or anything msgspec encodes) as JSON."""
    return json_bytes(msgspec.json.encode(payload), status=status)


def json_bytes(body: bytes, *, status: int = 200) -> web.Response:
    """Answer with what is JSON already."""
    return web.Response(body=body, status=status, content_type="application/json")


def error_response(error: PrefixFleetError) -> web.Response:
    """Answer with an error in OpenAI's shape."""
    shaped = (
        error if isinstance(error, RequestError) else RequestError("internal", "internal error")
    )
    response = json_response(envelope(shaped), status=shaped.shape.status)
    if shaped.retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(shaped.retry_after_s))
    if shaped.shape.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def read_json_body(request: web.Request) -> bytes:
    """Read a body that claims to be JSON; RequestError for another content type."""
    declared = request.headers.get("Content-Type")
    kind = request.content_type
    if declared is not None and kind != "application/json" and not kind.endswith("+json"):
        raise RequestError("invalid_request", f"Content-Type must be application/json, got {kind}")
    return await request.read()


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure before an answer has begun into OpenAI's shape, and log the request."""
    started = time.monotonic()
    request[REQUEST_ID] = choose_request_id(request.headers.get(REQUEST_ID_HEADER))
    status: int | str = "cancelled"
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        _log.log(
            logging.DEBUG if request.path in _POLLED_PATHS else logging.INFO,
            "request id=%s method=%s path=%s status=%s elapsed_s=%.3f",
            request[REQUEST_ID],
            request.method,
            request.path,
            status,
            time.monotonic() - started,
        )


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(_from_http(error, request))
    except ConnectionResetError:
        _log.info("client is gone id=%s path=%s", request[REQUEST_ID], request.path)
        return error_response(RequestError("internal", "the client is gone"))
    except Exception:  # noqa: BLE001  (the border of a request: logged, answered)
        _log.exception("unexpected failure id=%s path=%s", request[REQUEST_ID], request.path)
        return error_response(RequestError("internal", "internal error"))


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request on every answer; connected to `on_response_prepare`."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id


def require_bearer(token: str | None, *, required: bool) -> Any:
    """Return a middleware that lets in who shows `token`; /health is open.

    Without a token everybody is let in, unless one is `required`: then nobody is.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and (required or token is not None):
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            given = shown.strip().encode("utf-8", "surrogateescape")
            matches = hmac.compare_digest(given, (token or "").encode())
            if token is None or scheme.lower() != "bearer" or not matches:
                raise RequestError("unauthorized", "a valid bearer token is needed")
        return await handler(request)

    return check


def _from_http(error: web.HTTPException, request: web.Request) -> RequestError:
    kind = _KIND_OF_STATUS.get(error.status)
    if kind is None:
        kind = "invalid_request" if 400 <= error.status < 500 else "internal"
    messages = {
        404: f"there is no {request.path} here",
        405: f"{request.path} does not take {request.method}",
        413: "the body is too large",
    }
    return RequestError(kind, messages.get(error.status, error.reason))

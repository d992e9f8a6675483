"""The HTTP manners of both listeners: request ids, and every error in OpenAI's shape.

It knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError, envelope
from engine.frontend.parse import invalid_field
from kvindex.foundation.errors import PrefixFleetError
from router.request import identifiers

log = logging.getLogger("prefixfleet.router.http")

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
ANSWER_HEADERS = web.RequestKey("answer_headers", dict[str, str])
"""Headers for whatever answer comes, an error too."""
REQUEST_ID_HEADER = "x-request-id"
_JSON = "application/json"
_TLS_ONLY_S = 30 * 24 * 3600
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KIND_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}


def json_response(payload: object, *, status: int = 200) -> web.Response:
    """Answer with a Struct, or anything else that msgspec encodes."""
    return json_bytes(msgspec.json.encode(payload), status=status)


def json_bytes(body: bytes, *, status: int = 200) -> web.Response:
    """Answer with JSON that is encoded already."""
    return web.Response(body=body, status=status, content_type=_JSON)


def error_response(error: PrefixFleetError) -> web.Response:
    """Answer with an error; what is not a RequestError shows nothing of its inside."""
    status = error.shape.status if isinstance(error, RequestError) else 500
    response = json_response(envelope(error), status=status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def read_json(request: web.Request, *, timeout_s: float) -> bytes:
    """Read a body; raise RequestError unless it claims to be JSON (or nothing) and arrives."""
    declared = request.headers.get("content-type")
    if declared is not None and declared != _JSON:
        kind = request.content_type
        if kind != _JSON and not kind.endswith("+json"):
            raise RequestError("invalid_request", f"content-type must be {_JSON}, got {kind}")
    try:
        if request.content.is_eof():
            return await request.read()  # It has come with its head, as short ones do.
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestError("payload_too_large", "the body is too large") from None
    except TimeoutError:
        raise RequestError(
            "invalid_request", f"the body did not arrive within {timeout_s:g} s"
        ) from None


def decode_as(body: bytes, kind: type[T]) -> T:
    """Decode a body; raise RequestError naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except msgspec.DecodeError as error:
        raise RequestError("invalid_request", f"the body is not JSON: {error}") from None


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and every failure before an answer has begun its shape."""
    offered = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = offered if _SANE_ID.fullmatch(offered) else identifiers.request_id()
    try:
        return await handler(request)
    except PrefixFleetError as error:
        if not isinstance(error, RequestError):
            log.error("failed request_id=%s reason=%r", request[REQUEST_ID], str(error))
        return error_response(error)
    except web.HTTPException as error:
        return error_response(_from_http(error, request))
    except Exception:
        log.exception("failed request_id=%s path=%s", request[REQUEST_ID], request.path)
        return error_response(RequestError("internal", "internal error"))


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request id, and what is noted for it, on every answer (`on_response_prepare`)."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    response.headers.update(request.get(ANSWER_HEADERS, {}))


async def insist_on_tls(request: web.Request, response: web.StreamResponse) -> None:
    """Have a browser that came by TLS come by nothing else (`on_response_prepare`)."""
    if request.secure:
        response.headers["strict-transport-security"] = f"max-age={_TLS_ONLY_S}"


def _from_http(error: web.HTTPException, request: web.Request) -> RequestError:
    messages = {
        404: f"there is no {request.path} here",
        405: f"{request.path} does not take {request.method}",
        413: "the body is too large",
    }
    kind = _KIND_OF_STATUS.get(error.status)
    if kind is None:
        kind = "invalid_request" if error.status < 500 else "internal"
    return RequestError(kind, messages.get(error.status, error.reason))

"""`/admin/config`: which configuration is in use, and reading it again."""

from __future__ import annotations

from aiohttp import web

from engine.frontend.errors import RequestError
from router.api.access import CHANGE
from router.api.http import json_response
from router.api.openai import GATEWAY


async def show(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/config."""
    return json_response(request.app[GATEWAY].reload.state)


async def reload(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/config/reload; 422 with the place of the mistake when it is refused."""
    before = request.app[GATEWAY].reload.state.version
    result = await request.app[GATEWAY].reload.reload()
    request[CHANGE] = {"version": before}, {"version": result.version}
    if result.error is not None:
        raise RequestError("unprocessable", result.error)
    return json_response(result)

"""`/openapi.json` of a replica: what it serves to clients. It needs no key."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

import msgspec
from aiohttp import web

from engine.frontend.openapi import GENERATION, Operation, openapi_document
from worker.server.http import json_bytes

_OPERATIONS = (
    *GENERATION,
    Operation(
        method="get",
        path="/health",
        summary="Tell whether traffic may come",
        needs_key=False,
        answers_503=True,
    ),
    Operation(method="get", path="/metrics", summary="Answer a Prometheus scrape", is_text=True),
)


async def openapi(request: web.Request) -> web.Response:
    """Describe this replica."""
    return json_bytes(_document())


@cache
def _document() -> bytes:
    release = version("prefixfleet")
    return msgspec.json.encode(
        openapi_document(title="prefixfleet replica", version=release, operations=_OPERATIONS)
    )

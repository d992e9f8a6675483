"""`/openapi.json` of the client listener: one URL for the whole fleet. It needs no key."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

import msgspec
from aiohttp import web

from engine.frontend.openapi import GENERATION, ONE_MODEL, Operation, openapi_document
from router.api.health import Health
from router.api.http import json_bytes
from router.api.usage import OwnUsage

_OPERATIONS = (
    *GENERATION,
    ONE_MODEL,
    Operation(
        method="get",
        path="/v1/usage",
        summary="Tell what this key has used, and what its limits leave",
        answer=OwnUsage,
    ),
    *(
        Operation(
            method="get",
            path=path,
            summary=summary,
            answer=Health,
            needs_key=False,
            answers_503=True,
        )
        for path, summary in (
            ("/health", "Tell whether this process lives"),
            ("/ready", "Tell whether requests can be served"),
        )
    ),
)


async def openapi(request: web.Request) -> web.StreamResponse:
    """Describe the client listener."""
    return json_bytes(_document())


@cache
def _document() -> bytes:
    release = version("prefixfleet")
    return msgspec.json.encode(
        openapi_document(title="prefixfleet", version=release, operations=_OPERATIONS)
    )

"""POST /sleep, /wake_up and /update_weights, GET /is_sleeping, with vLLM's names.

A sleeping replica takes nothing: it answers 503 and its load report tells gateways so before it
falls asleep. What it was working on waits, and goes on when it wakes.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from aiohttp import web

from engine.frontend.errors import invalid_value
from engine.frontend.parse import parse_as
from engine.frontend.tokenizer_bundle import load_bundle
from engine.messages import SleepLevel
from kvindex.foundation.errors import ConfigError, DependencyError
from worker.model.folder import check_model_folder
from worker.server.front import ReplicaFront
from worker.server.generate_api import FRONT
from worker.server.http import json_response, read_json_body

_log = logging.getLogger("prefixfleet.replica.sleep")
_LEVELS: dict[str, SleepLevel] = {"1": 1, "2": 2}


class UpdateWeightsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /update_weights: a folder on the replica's machine."""

    path: str


async def sleep(request: web.Request) -> web.Response:
    """Give memory back: `?level=1` (the default) that of the KV cache, 2 that of the weights too.

    The prefix cache is emptied first. 409 when this engine cannot do without its weights.
    """
    front = request.app[FRONT]
    given = request.query.get("level", "1")
    if given not in _LEVELS:
        raise invalid_value("level", f"must be 1 or 2, got {given!r}")
    async with front.changes:
        with front.resting("this replica is falling asleep"):
            await front.client.sleep(_LEVELS[given])
        front.report_now()
    _log.info("asleep level=%s", given)
    return json_response({"is_sleeping": True})


async def wake_up(request: web.Request) -> web.Response:
    """Go on; answers when the weights are loaded again. A no-op for a replica that is awake."""
    front = request.app[FRONT]
    async with front.changes:
        with front.resting("this replica is waking up"):
            await front.client.wake_up()
        front.report_now()
    _log.info("awake")
    return json_response({"is_sleeping": False})


async def is_sleeping(request: web.Request) -> web.Response:
    """Tell whether any engine core sleeps."""
    return json_response({"is_sleeping": request.app[FRONT].sleep_level is not None})


async def update_weights(request: web.Request) -> web.Response:
    """Serve another checkpoint of the same model; it is awake afterwards.

    400 for a folder that is no such checkpoint, 409 when it cannot be loaded: the old weights go
    on serving then. Nothing of the old weights is cached any more, and no request is resumed from
    one to the other: the execution digest in the registry is another one.
    """
    front = request.app[FRONT]
    given = parse_as(await read_json_body(request), UpdateWeightsRequest)
    async with front.changes:
        folder = await front.pool.run(lambda: _check(front, given.path))
        with front.resting("this replica is loading other weights"):
            await front.client.update_weights(str(folder))
            await front.publish_record()
        front.report_now()
    digest = front.client.info.execution_digest
    _log.info("weights updated folder=%s execution_digest=%s", folder, digest[:16])
    return json_response({"success": True, "execution_digest": digest})


def _check(front: ReplicaFront, path: str) -> Path:
    """Return the folder; RequestError unless it has a model that speaks the same tokens."""
    folder = Path(path).expanduser().absolute()
    try:
        if front.spec.executor == "model":
            check_model_folder(folder)
        bundle = load_bundle(folder)
    except (ConfigError, DependencyError) as error:
        raise invalid_value("path", str(error)) from None
    if bundle.tokenizer_digest != front.bundle.tokenizer_digest:
        raise invalid_value(
            "path", "the folder's tokenizer is another one than that of this replica"
        )
    return folder

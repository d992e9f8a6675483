"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's names and bodies.

An adapter is served as soon as its load is answered, under its own model name.
"""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError, invalid_value
from engine.frontend.parse import parse_as
from kvindex.foundation.errors import ConfigError, DependencyError
from worker.server.generate_api import FRONT
from worker.server.http import read_json_body

_log = logging.getLogger("prefixfleet.replica.adapters")


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`load_inplace` lets the name be in use: then it means the new folder from now on."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora_int_id` is vLLM's, and says nothing here."""

    lora_name: str
    lora_int_id: int | None = None


async def load(request: web.Request) -> web.Response:
    """Serve an adapter under a name; 400 when the folder cannot be used or the name is taken.

    Other weights under a name and path that were served before cost all that is cached, and
    running requests their place: block hashes cannot tell the two apart.
    """
    front = request.app[FRONT]
    given = parse_as(await read_json_body(request), LoadAdapterRequest)
    name = given.lora_name
    async with front.changes:
        if front.adapters.get(name) is not None and not given.load_inplace:
            raise invalid_value(
                "lora_name", f"{name!r} is loaded already; set load_inplace to replace it"
            )
        try:
            adapter = await front.pool.run(lambda: front.adapters.check(name, given.lora_path))
        except (ConfigError, DependencyError) as error:
            raise RequestError("invalid_request", str(error), param="lora_path") from None
        if front.adapters.is_stale(adapter):
            await front.client.reset_prefix_cache(preempt_running=True)
        front.adapters.add(adapter)
    _log.info("adapter served name=%s path=%s digest=%s", name, adapter.path, adapter.digest[:16])
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: web.Request) -> web.Response:
    """Serve an adapter no longer; 404 when there is none of that name."""
    front = request.app[FRONT]
    given = parse_as(await read_json_body(request), UnloadAdapterRequest)
    async with front.changes:
        front.adapters.remove(given.lora_name)
    _log.info("adapter unloaded name=%s", given.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{given.lora_name}' removed successfully.")

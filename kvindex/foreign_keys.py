"""The extra keys of a foreign engine's block, read from its event.

vLLM publishes them without the tags that it hashes: a bare LoRA name, a bare cache salt, a list
of image identifier and offset. Tagged ones are read too. It knows no hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvindex.events import BlockStored
from kvindex.foundation.errors import WireError
from kvindex.hashing import Adapter


class KeysUnreadableError(WireError):
    """Raised when a block depends on something that the pool's hashes cannot tell."""


class BlockKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a block's hash covers beside tokens and parent."""

    adapter: Adapter | None = None
    salt: str | None = None


def read_keys(
    event: BlockStored, position: int, adapters: Mapping[str, Adapter], *, is_first: bool
) -> BlockKeys:
    """Read the keys of the block at `position` of an event; `is_first`: it starts its chain.

    Raises KeysUnreadableError for images, prompt embeddings and adapters whose path is unknown.
    """
    adapter = _adapter(event.lora_name, adapters)
    every = event.extra_keys or []
    given = every[position] if position < len(every) else None
    salt: str | None = None
    for key in _as_list(given):
        if key == event.lora_name or _is_tagged(key, "lora"):
            continue
        if not is_first or salt is not None:
            raise KeysUnreadableError(f"extra key {key!r} of a block")
        salt = _salt(key)
    return BlockKeys(adapter=adapter, salt=salt)


def _adapter(name: str | None, adapters: Mapping[str, Adapter]) -> Adapter | None:
    if name is None:
        return None
    if name not in adapters:
        raise KeysUnreadableError(f"the path of adapter {name!r} is not known")
    return adapters[name]


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _is_tagged(key: Any, tag: str) -> bool:
    return isinstance(key, list | tuple) and len(key) > 1 and key[0] == tag


def _salt(key: Any) -> str:
    if isinstance(key, str):
        return key
    if _is_tagged(key, "cache_salt") and isinstance(key[1], str):
        return str(key[1])
    raise KeysUnreadableError(f"extra key {key!r} of a block")

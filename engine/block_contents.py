"""What cached blocks hold, told with their KV events, for consumers that hash tokens themselves.

Made only for an engine that is to announce tokens: they and the cache salts are what prompts are
made of. A content is kept as long as some tier holds its block, because a block that moves between
tiers is announced again. It knows neither blocks nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgspec

from engine.request import Request
from kvindex.events import SPEC_KIND_OF_RULE, BlockRemoved, BlockStored, KVEvent
from kvindex.hashing import BlockHash
from kvindex.hit_rule import GroupRule

_Key = tuple[int, bytes]  # cache group and block hash


class BlockContent(NamedTuple):
    """The tokens that one hash adds to its parent, and its extra keys: untagged, as vLLM's are."""

    token_ids: list[int]
    extra_keys: tuple[str, ...] | None


@dataclass(slots=True)
class _Held:
    content: BlockContent
    num_tiers: int = 0


class BlockContents:
    """Remembers contents between the step that writes a block and the last event of its hash.

    `rules` are those of the cache groups, by index; None is a group that is never cached. Memory:
    a list of `block_size` numbers for each cached hash.
    """

    def __init__(self, rules: Sequence[GroupRule | None]) -> None:
        self._rules = rules
        self._noted: dict[int, dict[_Key, BlockContent]] = {}
        self._written: dict[_Key, BlockContent] = {}
        self._held: dict[_Key, _Held] = {}

    def note(self, step: int, group: int, request: Request, start: int, end: int) -> None:
        """Note what `step` writes: the tokens of hash units `start` to `end` of a request.

        They are found under the last unit's hash, as they are committed.
        """
        size, source = request.chain.block_size, request.source
        keys = [] if request.lora_name is None else [request.lora_name]
        if start == 0 and source.cache_salt:
            keys.append(source.cache_salt)
        content = BlockContent(request.token_ids[start * size : end * size], tuple(keys) or None)
        block_hash: BlockHash = request.chain.hashes[end - 1]
        self._noted.setdefault(step, {})[group, block_hash] = content

    def written(self, step: int) -> None:
        """Expect events of what `step` has written; what was given back meanwhile has none."""
        self._written |= self._noted.pop(step, {})

    def told(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Return the events with what their blocks hold; all since the last call, in order."""
        told = [self._told(event) for event in events]
        self._written.clear()
        return told

    def _told(self, event: KVEvent) -> KVEvent:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved(block_hashes=hashes, group_idx=group):
                for block_hash in hashes:
                    self._removed((group or 0, _digest(block_hash)))
            case _:
                self._held.clear()
        return event

    def _stored(self, event: BlockStored) -> BlockStored:
        group = event.group_idx or 0
        contents = [self._take((group, _digest(h))) for h in event.block_hashes]
        rule = self._rules[group]
        assert rule is not None, f"group {group} is never cached"
        return msgspec.structs.replace(
            event,
            token_ids=list(chain.from_iterable(c.token_ids for c in contents)),
            block_size=len(contents[0].token_ids),
            extra_keys=[content.extra_keys for content in contents],
            kv_cache_spec_kind=SPEC_KIND_OF_RULE[rule.kind],
            kv_cache_spec_sliding_window=rule.span if rule.kind == "window" else None,
        )

    def _take(self, key: _Key) -> BlockContent:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(self._written[key])
        held.num_tiers += 1
        return held.content

    def _removed(self, key: _Key) -> None:
        held = self._held[key]
        held.num_tiers -= 1
        if held.num_tiers == 0:
            del self._held[key]


def _digest(wire_hash: bytes | int) -> bytes:
    assert isinstance(wire_hash, bytes), "our own events carry whole digests"
    return wire_hash

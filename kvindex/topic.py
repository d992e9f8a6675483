"""The topic of our KV events: which replica speaks, and since which boot.

A new boot is a new topic, so a consumer sees a restart in the first frame. Foreign engines have
topics of their own; they are no error here, they just tell nothing.
"""

from __future__ import annotations

import msgspec

_PREFIX = "kv"


class KvTopic(msgspec.Struct, frozen=True):
    """What our topics say."""

    replica_id: str
    boot_ns: int

    def __str__(self) -> str:
        return f"{_PREFIX}@{self.replica_id}@{self.boot_ns}"


def parse_topic(topic: str) -> KvTopic | None:
    """Return what a topic says, None when it is not one of ours."""
    prefix, _, rest = topic.partition("@")
    replica_id, at, boot_ns = rest.rpartition("@")
    if prefix != _PREFIX or not at or not (boot_ns.isascii() and boot_ns.isdigit()):
        return None
    return KvTopic(replica_id, int(boot_ns))

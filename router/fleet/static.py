"""Engines that do not register: asked over HTTP whether they live and what they serve.

It fills the condition of a configured replica; it gives no credit for any cache.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from router.config import StaticReplica
from router.fleet.client import ReplicaClient, ReplicaFailure
from router.fleet.replica import Replica

log = logging.getLogger("prefixfleet.router.static")

PROBE_TIMEOUT_S = 2.0


class _Card(msgspec.Struct, frozen=True):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


class StaticProbe:
    """Keeps one configured replica up to date; call `refresh` from one task."""

    def __init__(self, config: StaticReplica, client: ReplicaClient) -> None:
        self._config = config
        self._client = client
        kind: Literal["openai", "vllm"] = "vllm" if config.kind == "vllm" else "openai"
        self.replica = Replica(
            id=config.id, kind=kind, url=config.base_url, token=config.api_key, reason="not probed"
        )

    async def refresh(self, now: float) -> None:
        """Ask `/v1/models`, which every kind answers; a failure marks the replica as not live."""
        replica = self.replica
        url = f"{replica.url}/v1/models"
        try:
            body = await self._client.get(url, headers=replica.headers, timeout_s=PROBE_TIMEOUT_S)
            models = msgspec.json.decode(body, type=_Models)
        except (ReplicaFailure, msgspec.DecodeError) as error:
            self._note(live=False, reason=str(error))
            return
        replica.served_models = tuple(card.id for card in models.data)
        lengths = [card.max_model_len for card in models.data if card.max_model_len]
        replica.max_model_len = min(lengths) if lengths else None
        if self._config.kind == "auto" and any(c.owned_by == "vllm" for c in models.data):
            replica.kind = "vllm"
        replica.seen_at = now
        self._note(live=True, reason="")

    def _note(self, *, live: bool, reason: str) -> None:
        replica = self.replica
        if live and not replica.live:
            log.info(
                "static replica up replica=%s kind=%s models=%s mode=FALLBACK",
                replica.id,
                replica.kind,
                ",".join(replica.served_models),
            )
            if replica.kind == "vllm" and self._config.events is None:
                log.info("%s", exact_hint(replica))
        elif not live and (replica.live or replica.reason == "not probed"):
            log.warning("static replica down replica=%s reason=%r", replica.id, reason)
        replica.live = live
        replica.reason = reason


def exact_hint(replica: Replica) -> str:
    """Say which vLLM flags publish what exact routing needs to know."""
    return (
        f"replica {replica.id} serves in FALLBACK, by load alone: exact prefix routing needs its "
        "KV events (vllm serve --kv-events-config "
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558"}\' --enable-prompt-tokens-details) and `events: auto` '
        "in its entry of router.replicas"
    )

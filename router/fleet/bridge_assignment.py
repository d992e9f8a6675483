"""How a stock engine fits into the fleet: what it is, which pool it joins, and if tokens agree.

Asked anew whenever the engine may be another one. It follows nothing; router/fleet/bridge.py does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle, load_bundle
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme
from kvindex.registry import ModelIdentity, Registry, ReplicaRecord
from router.config import StaticReplica
from router.fleet.client import ReplicaClient
from router.fleet.template_check import template_trouble
from router.fleet.tokenizers import decode_bundle
from router.fleet.vllm_engine import TIMEOUT_S, EngineFacts, EventEndpoints, VllmEngine

AUTO = "auto"
"""The value of `events` that asks the engine itself where it publishes."""

_UNLIMITED = 2**24


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine fits: its pool, where it publishes, what is wrong with it.

    `trouble` keeps conversations from being predicted.
    """

    facts: EngineFacts
    endpoints: EventEndpoints
    identity: ModelIdentity
    scheme: HashScheme
    trouble: str | None


class Assigner:
    """Works out assignments of one configured engine.

    `internal_headers` are for replicas of ours, which hand out their tokenizer. `on_bundle` is
    given the tokenizer of a pool that has no replica of ours.
    """

    def __init__(
        self,
        config: StaticReplica,
        *,
        engine: VllmEngine,
        client: ReplicaClient,
        registry: Registry,
        clock: Clock,
        internal_headers: Mapping[str, str],
        on_bundle: Callable[[TokenizerBundle], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._client = client
        self._registry = registry
        self._clock = clock
        self._internal_headers = internal_headers
        self._on_bundle = on_bundle

    async def assign(self) -> Assignment:
        """Find out what the engine is and which pool it belongs to.

        Raises ReplicaFailure when it cannot be asked, ConfigError when it says too little, and
        HashMismatchError when its tokens are others than the pool's.
        """
        facts = await self._engine.facts()
        if not facts.served_models:
            raise ConfigError(f"{self._engine.url} serves no model")
        endpoints = await self._endpoints()
        model = facts.served_models[0]
        sibling = await self._sibling(model)
        if sibling is None:
            bundle = self._bundle_of_folder(facts)
            self._on_bundle(bundle)
            identity, scheme = _identity(model, bundle), HashScheme()
        else:
            bundle = await self._fetch(sibling)
            identity, scheme = sibling.identity, sibling.hash_scheme
        encoder = await asyncio.to_thread(self._encoder, bundle, facts)
        trouble = await template_trouble(self._engine, encoder, model=model)
        return Assignment(
            facts=facts, endpoints=endpoints, identity=identity, scheme=scheme, trouble=trouble
        )

    async def fits(self, assignment: Assignment) -> bool:
        """Tell whether the pool to join is still that of the assignment."""
        sibling = await self._sibling(assignment.facts.served_models[0])
        joined = (assignment.identity, assignment.scheme)
        return sibling is None or (sibling.identity, sibling.hash_scheme) == joined

    async def _endpoints(self) -> EventEndpoints:
        config = self._config
        told = await self._engine.event_endpoints()
        if config.events is not None and config.events != AUTO:
            return EventEndpoints(config.events, config.replay or (told.replay if told else None))
        if told is None:
            raise ConfigError(
                f"{self._engine.url} does not say where it publishes KV events; start it with "
                "--kv-events-config, or set `events` to tcp://HOST:PORT"
            )
        return told

    async def _sibling(self, model: str) -> ReplicaRecord | None:
        """Return a replica of ours that serves the model: its pool is the one to join."""
        records = await self._registry.records()
        ours = [r for r in records if r.kind == "prefixfleet" and model in r.served_models]
        return min(ours, key=lambda r: (r.epoch, r.id), default=None)

    async def _fetch(self, sibling: ReplicaRecord) -> TokenizerBundle:
        data = await self._client.get(
            f"{sibling.url}/tokenizer", headers=self._internal_headers, timeout_s=TIMEOUT_S
        )
        return decode_bundle(data, sibling.identity)

    def _bundle_of_folder(self, facts: EngineFacts) -> TokenizerBundle:
        folder = self._config.tokenizer or facts.root
        if folder is None or not Path(folder).is_dir():
            raise ConfigError(
                f"no tokenizer for {facts.served_models[0]}: no replica of ours serves it, and "
                f"{folder!r} is no folder here; set `tokenizer` to a folder with tokenizer.json"
            )
        return load_bundle(Path(folder))

    def _encoder(self, bundle: TokenizerBundle, facts: EngineFacts) -> PromptEncoder:
        longest = facts.max_model_len or _UNLIMITED
        return PromptEncoder(bundle, clock=self._clock, max_model_len=longest)


def _identity(model: str, bundle: TokenizerBundle) -> ModelIdentity:
    return ModelIdentity(
        model=model,
        tokenizer_digest=bundle.tokenizer_digest,
        template_digest=bundle.template_digest,
    )

"""Tokenizers of the pools, handed over by their replicas and kept by digest.

A gateway needs no model volume: it asks a replica once, checks the digests that the replica
signed, and remembers the bundle in memory and, given a folder, on disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError, WireError
from kvindex.registry import ModelIdentity
from router.fleet.client import ReplicaClient, ReplicaFailure
from router.fleet.pools import Pool

log = logging.getLogger("prefixfleet.router.tokenizers")

_FETCH_TIMEOUT_S = 10.0
_RETRY_AFTER_S = 2.0
_MAX_PROMPT_TOKENS = 2**24
"""What is tokenized at most for a model whose replicas state no context length."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Source(msgspec.Struct, frozen=True):
    """A replica that can hand over the bundle."""

    replica: str
    url: str
    headers: dict[str, str]


class TokenizerStore:
    """Prompt encoders by pool. One fetch per pool at a time; a failed one rests for a while."""

    def __init__(
        self,
        client: ReplicaClient,
        *,
        clock: Clock,
        executor: Executor,
        cache_dir: Path | None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._executor = executor
        self._cache_dir = cache_dir
        self._encoders: dict[tuple[str, int], PromptEncoder] = {}
        self._bundles: dict[str, TokenizerBundle] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._failed_at: dict[str, float] = {}
        self._offered: dict[tuple[str, str], TokenizerBundle] = {}

    def offer(self, bundle: TokenizerBundle) -> None:
        """Keep a bundle for pools whose replicas hand out none."""
        self._offered[bundle.tokenizer_digest, bundle.template_digest] = bundle

    async def get(
        self, pool: Pool, sources: Sequence[Source], *, max_model_len: int | None
    ) -> PromptEncoder | None:
        """Return the encoder of a pool, None while no replica hands over a usable bundle."""
        limit = max_model_len or _MAX_PROMPT_TOKENS
        key = (pool.id, limit)
        known = self._encoders.get(key)
        if known is not None:
            return known
        async with self._locks.setdefault(pool.id, asyncio.Lock()):
            known = self._encoders.get(key)
            failed_at = self._failed_at.get(pool.id)
            resting = failed_at is not None and self._clock.monotonic() - failed_at < _RETRY_AFTER_S
            if known is not None or resting:
                return known
            encoder = await self._load(pool, sources, limit)
            if encoder is None:
                self._failed_at[pool.id] = self._clock.monotonic()
            else:
                self._encoders[key] = encoder
            return encoder

    async def _load(
        self, pool: Pool, sources: Sequence[Source], max_model_len: int
    ) -> PromptEncoder | None:
        digests = (pool.identity.tokenizer_digest, pool.identity.template_digest)
        bundle = self._bundles.get(pool.id) or self._offered.get(digests)
        bundle = bundle or self._read_cached(pool.identity)
        for source in () if bundle is not None else sources:
            bundle = await self._fetch(pool.identity, source)
            if bundle is not None:
                self._write_cached(pool.identity, bundle)
                break
        if bundle is None:
            log.warning("no tokenizer pool=%s model=%s", pool.id, pool.model)
            return None
        self._bundles[pool.id] = bundle
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._executor, self._build_encoder, bundle, max_model_len
            )
        except ConfigError as error:
            log.error("unusable tokenizer pool=%s model=%s reason=%r", pool.id, pool.model, error)
            return None

    def _build_encoder(self, bundle: TokenizerBundle, max_model_len: int) -> PromptEncoder:
        return PromptEncoder(bundle, clock=self._clock, max_model_len=max_model_len)

    async def _fetch(self, identity: ModelIdentity, source: Source) -> TokenizerBundle | None:
        try:
            data = await self._client.get(
                f"{source.url}/tokenizer", headers=source.headers, timeout_s=_FETCH_TIMEOUT_S
            )
            return decode_bundle(data, identity)
        except (ReplicaFailure, WireError) as error:
            log.warning("no tokenizer from replica=%s reason=%r", source.replica, str(error))
            return None

    def _cache_path(self, identity: ModelIdentity) -> Path | None:
        if self._cache_dir is None or not _DIGEST.fullmatch(identity.tokenizer_digest):
            return None
        template = identity.template_digest
        if template and not _DIGEST.fullmatch(template):
            return None
        name = f"{identity.tokenizer_digest[:32]}-{template[:32] or 'none'}.msgpack"
        return self._cache_dir / "tokenizers" / name

    def _read_cached(self, identity: ModelIdentity) -> TokenizerBundle | None:
        path = self._cache_path(identity)
        if path is None or not path.is_file():
            return None
        try:
            return decode_bundle(path.read_bytes(), identity)
        except (OSError, WireError) as error:
            log.warning("ignoring cached tokenizer path=%s reason=%r", path, str(error))
            return None

    def _write_cached(self, identity: ModelIdentity, bundle: TokenizerBundle) -> None:
        path = self._cache_path(identity)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(msgspec.msgpack.encode(bundle))
            os.replace(file.name, path)
        except OSError as error:
            log.warning("cannot cache tokenizer path=%s reason=%r", path, str(error))


def decode_bundle(data: bytes, identity: ModelIdentity) -> TokenizerBundle:
    """Decode a bundle; raise WireError unless it is the one that the identity names."""
    try:
        bundle = msgspec.msgpack.decode(data, type=TokenizerBundle)
        digests = (bundle.tokenizer_digest, bundle.template_digest)
    except (msgspec.DecodeError, KeyError, ConfigError, UnicodeDecodeError) as error:
        raise WireError(f"tokenizer bundle: {error}") from None
    wanted = (identity.tokenizer_digest, identity.template_digest)
    if digests != wanted:
        raise WireError(
            f"tokenizer bundle has digests {digests}, the replica registered with {wanted}"
        )
    return bundle

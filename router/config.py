"""Settings of the gateway: section `router`, section `tenants`, and what its process is handed.

It describes and checks single values; who may use which key is decided in tenancy/, and which
policy names exist in policy/registry.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Sha256Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class StaticReplica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible engine that does not register itself.

    `kind` "auto" asks the engine: one whose `/v1/models` says `owned_by: vllm` is a vLLM, which
    honours `cache_salt`; anything else is opaque. `api_key` is the engine's own, if it wants one.
    """

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+.*$")]
    kind: Literal["auto", "openai", "vllm"] = "auto"
    name: Name | None = None
    api_key: str | None = None

    @property
    def base_url(self) -> str:
        """The URL without a trailing slash or `/v1`, so that both spellings work."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def id(self) -> str:
        """The replica id: `name`, else host and port."""
        return self.name or self.base_url.split("://", 1)[1]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the gateway listens, waits and places (section `router`); port 0 takes a free one.

    `first_token_timeout_s` bounds the wait for a first token on one replica; what is expected to
    wait longer is shed. `keep_alive_s`: silence after which a stream carries an SSE comment.
    `stall_timeout_s` bounds the silence inside a stream, `response_timeout_s` the wait for an
    unstreamed answer of a foreign engine. `index_timeout_s` bounds what a slow index may add to
    one request. A client whose body takes longer than `body_timeout_s`, or that reads nothing for
    `write_timeout_s`, is given up. `max_in_flight` requests are served at a time, the next one
    gets 429.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    max_body_bytes: Positive = 16 * 1024 * 1024
    max_in_flight: Positive = 4096
    max_attempts: Positive = 3
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 120.0
    stall_timeout_s: Seconds = 120.0
    response_timeout_s: Seconds = 600.0
    keep_alive_s: Seconds = 5.0
    index_timeout_s: Seconds = 0.5
    poll_s: Seconds = 1.0
    gateway_lease_s: Seconds = 10.0
    drain_timeout_s: Seconds = 30.0
    body_timeout_s: Seconds = 60.0
    write_timeout_s: Seconds = 60.0
    max_decisions: Positive = 10_000
    num_encoder_threads: Positive = 2
    default_policy: str = "prefix_cost"
    default_policy_params: dict[str, float] = {}
    replicas: tuple[StaticReplica, ...] = ()


class TenantKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key, known by its SHA-256 only; `expires_at` in seconds since the Unix epoch."""

    hash: Sha256Hex
    alias: str = ""
    expires_at: float | None = None
    blocked: bool = False


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant (an item of section `tenants`).

    `isolation`: "tenant" shares cached prefixes with nobody, "shared" with every shared tenant,
    any other word names the group to share with. `models` None allows every model. A tenant with
    `anonymous: true` serves requests that carry no key; at most one may.
    """

    name: Name
    keys: tuple[TenantKey, ...] = ()
    anonymous: bool = False
    models: tuple[str, ...] | None = None
    policy: str | None = None
    policy_params: dict[str, float] = {}
    isolation: Name = "tenant"
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    @property
    def isolation_group(self) -> str:
        """The group that the cache salt is derived from; namespaced so that none can collide."""
        if self.isolation == "tenant":
            return f"tenant/{self.name}"
        return "shared" if self.isolation == "shared" else f"group/{self.isolation}"


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one gateway process needs, secrets in clear: the file that holds it is 0600.

    `index_url` None runs without an index: static replicas only, FALLBACK; of `redis` only the
    time-outs matter. Without `tenants` there is one anonymous tenant `default` with shared
    isolation. `cache_dir` keeps tokenizer bundles between starts.
    """

    router: RouterConfig = RouterConfig()
    tenants: tuple[TenantConfig, ...] = ()
    index_url: str | None = None
    redis: RedisConfig = RedisConfig()
    fleet_secret: Annotated[str, msgspec.Meta(min_length=16)]
    internal_token: str | None = None
    admin_key: Annotated[str, msgspec.Meta(min_length=16)]
    cache_dir: str | None = None


def load_spec(path: Path) -> GatewaySpec:
    """Read a `GatewaySpec` from a JSON file; raise ConfigError naming file and field."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=GatewaySpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None

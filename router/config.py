"""Settings of the gateway: section `router`, section `tenants`, and what its process is handed.

It describes and checks single values; who may use which key is decided in tenancy/, and which
policy names exist in policy/registry.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError
from kvindex.foundation.text_forms import text_form
from router.policy.queueing import QueueConfig
from router.policy.replication import ReplicationConfig

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[
    str,
    text_form(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        "a name (1 to 64 of a-z A-Z 0-9 . _ -, the first a letter or digit)",
    ),
]
Sha256Hex = Annotated[str, text_form(r"^[0-9a-f]{64}$", "64 lower-case hex digits of SHA-256")]

EventsAddress = Annotated[
    str, text_form(r"^(auto|tcp://.+|ipc://.+)$", '"auto", tcp://… or ipc://…')
]


class StaticReplica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible engine that does not register itself.

    `kind` "auto" asks the engine: one whose `/v1/models` says `owned_by: vllm` is a vLLM, which
    honours `cache_salt`; anything else is opaque. `api_key` is the engine's own, if it wants one.

    `events` brings a vLLM into the index by its KV events: a ZMQ endpoint (that of rank 0), or
    "auto" to ask the engine; `replay` likewise is asked for when left out. `tokenizer` is a folder
    with tokenizer.json, needed where no replica of ours serves the model and the engine's own
    model folder is not on this machine.
    """

    url: Annotated[str, text_form(r"^https?://[^/]+.*$", "a URL, http:// or https://")]
    kind: Literal["auto", "openai", "vllm"] = "auto"
    name: Name | None = None
    api_key: str | None = None
    events: EventsAddress | None = None
    replay: Annotated[str, text_form(r"^(tcp://.+|ipc://.+)$", "tcp://… or ipc://…")] | None = None
    tokenizer: str | None = None
    data_parallel_size: Positive = 1

    def __post_init__(self) -> None:
        if self.events is not None and self.kind == "openai":
            raise ValueError("events: only a vLLM publishes any; set kind to vllm")
        if self.events is None and (self.replay or self.data_parallel_size > 1):
            raise ValueError("replay and data_parallel_size mean nothing without events")

    @property
    def headers(self) -> dict[str, str]:
        """What every call to it carries."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def base_url(self) -> str:
        """The URL without a trailing slash or `/v1`, so that both spellings work."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def id(self) -> str:
        """The replica id: `name`, else host and port."""
        return self.name or self.base_url.split("://", 1)[1]


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a gateway records its traffic as a trace for `prefixfleet replay run`; never any text.

    A file that exists is kept, and a number put into the new one's name. `max_bytes` end it.
    """

    path: str
    max_bytes: Positive = 1024 * 1024 * 1024


class UsageFilesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a gateway process writes a line of JSON for each request that its tenants are charged.

    A file is finished, and the next one begun, once it would exceed `max_bytes` or is `max_age_s`
    old. Finished ones are nobody's but the operator's: none is ever removed.
    """

    folder: str
    max_bytes: Positive = 64 * 1024 * 1024
    max_age_s: Seconds = 3600.0


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The certificate of both listeners, and its key, as PEM files; re-read when renewed.

    The certificate is followed by those of its authorities, if there are any between it and one
    that clients know. With `client_ca` the listener of clients wants a certificate by one of the
    authorities in that file from each of them; the admin listener does not.
    """

    certificate: str
    key: str
    client_ca: str | None = None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the gateway listens, waits and places (section `router`); port 0 takes a free one.

    `first_token_timeout_s` bounds the wait for a first token on one replica; what is expected to
    wait longer is shed. `keep_alive_s`: silence after which a stream carries an SSE comment.
    `stall_timeout_s` bounds the silence inside a stream, `response_timeout_s` the wait for an
    unstreamed answer of a foreign engine. A stream that is silent for `lapse_grace_s` after its
    replica's lease has lapsed goes elsewhere. Of all requests at most `retry_share` is tried again
    (beyond `retry_burst` at once), each after up to `retry_jitter_s`. `index_timeout_s` bounds
    what a slow index may add to one request. A client whose body takes longer than
    `body_timeout_s`, or that reads nothing for `write_timeout_s`, is given up. `max_in_flight`
    requests are served at a time, the next one gets 429. `queue`, `saturation_s`, `max_siblings`
    and `hot_prefixes` are the planner's guards (docs/routing.md), null switches one off.
    `processes` serve on the one port; what a process bounds, it bounds for itself. With `tls` both
    listeners speak HTTPS alone; with `usage_files` usage is written to files, too.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    tls: TlsConfig | None = None
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
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
    lapse_grace_s: Seconds = 5.0
    retry_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    retry_burst: Positive = 1024
    retry_jitter_s: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    body_timeout_s: Seconds = 60.0
    write_timeout_s: Seconds = 60.0
    max_decisions: Positive = 10_000
    num_encoder_threads: Positive = 2
    default_policy: str = "prefix_cost"
    default_policy_params: dict[str, float] = {}
    queue: QueueConfig | None = QueueConfig()
    saturation_s: Seconds | None = None
    max_siblings: Positive | None = 64
    hot_prefixes: ReplicationConfig | None = ReplicationConfig()
    record: RecordConfig | None = None
    usage_files: UsageFilesConfig | None = None
    replicas: tuple[StaticReplica, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.id in seen:
                raise ValueError(f"replicas: two are called {replica.id!r}; give one a `name`")
            seen.add(replica.id)


GENERATED_KEY = "generated"
"""The alias of a key that `prefixfleet up` makes for a tenant that declares none."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant or a key may use, over the whole fleet; None is unlimited.

    Tokens are charged ones (engine/frontend/charge.py). A minute is any 60 s; a day and a month
    are those of UTC. From the share `soft_limit` of a day's or month's tokens on, answers carry a
    warning.
    """

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_parallel: Positive | None = None
    tokens_per_day: Positive | None = None
    tokens_per_month: Positive | None = None
    soft_limit: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8


class TenantKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key, known by its SHA-256 only; `expires_at` in seconds since the Unix epoch.

    `models` narrows what its tenant may use; `limits` hold for this key alone, beside those of its
    tenant. `owner` is for people.
    """

    hash: Sha256Hex
    alias: str = ""
    owner: str = ""
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    expires_at: float | None = None
    blocked: bool = False


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant (an item of section `tenants`).

    `isolation`: "tenant" shares cached prefixes with nobody, "shared" with every shared tenant,
    any other word names the group to share with. `models` None allows every model; `aliases` are
    names of the tenant's own for models, and may be used whatever `models` says. A tenant with
    `anonymous: true` serves requests that carry no key; at most one may. A blocked one serves none.
    Its requests are at most as urgent as `priority_ceiling` (lower is more urgent).
    """

    name: Name
    keys: tuple[TenantKey, ...] = ()
    anonymous: bool = False
    blocked: bool = False
    models: tuple[str, ...] | None = None
    aliases: dict[str, str] = {}
    limits: Limits = Limits()
    policy: str | None = None
    policy_params: dict[str, float] = {}
    isolation: Name = "tenant"
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    priority_ceiling: int = 0

    @property
    def isolation_group(self) -> str:
        """The group that the cache salt is derived from; namespaced so that none can collide."""
        if self.isolation == "tenant":
            return f"tenant/{self.name}"
        return "shared" if self.isolation == "shared" else f"group/{self.isolation}"


class ConfigSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the settings came from, so that they can be read again: the file of `-c`, and flags.

    `overrides` are the flags by dotted path. `file` None: there is nothing to read again.
    """

    file: str | None = None
    overrides: dict[str, Any] = {}


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
    source: ConfigSource | None = None


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

"""What crosses the border of the engine core: requests in, tokens and statistics out.

All of it is msgpack-encodable; the process that carries it is worker/core.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.frontend.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one client request.

    `request_id` is unique among live requests (`{id}-{choice}`). `resume_token_ids` were emitted
    elsewhere before: they count as output, not as prompt. `seed` of `sampling` is always set.
    Lower `priority` is more urgent; `tenant` and `weight` (> 0) matter to the fair order.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    choice: int = 0
    cache_salt: str | None = None
    priority: int = 0
    tenant: str | None = None
    weight: float = 1.0
    resume_token_ids: list[int] = []


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request after a step.

    `num_cached_tokens` comes once, with the first output: the prompt tokens not computed because
    their blocks were cached at first admission. `stop_token_id` names the stop token, if one
    ended it (it is the last of `token_ids`); `finish_reason` None means "more will come". With
    `finish_reason` "error", `error` says why and `error_kind` is a kind of engine/frontend/errors.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    error_kind: str | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters and gauges of one engine; `*_total` only grow.

    `step` counts executed steps and heartbeats alike: a front whose core stops counting is dead.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    evictions_total: int = 0
    busy_s_total: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine core says of itself once it can serve."""

    boot_ns: int
    num_blocks: int
    block_size: int
    max_model_len: int
    known_answer: bytes
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    execution_digest: str = ""
    vocab_size: int = 0


class SnapshotEntry(msgspec.Struct, frozen=True, array_like=True):
    """One cached block of a snapshot."""

    block_hash: bytes
    group: int = 0
    tier: str = "gpu"


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Every cached block at a step border; `seq` is the last event batch published, -1 if none."""

    boot_ns: int
    seq: int
    dp_rank: int = 0
    entries: list[SnapshotEntry]


# Client -> core


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Enqueue requests, in order."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget requests; unknown ids are ignored."""

    request_ids: list[str]


UtilityMethod = Literal["snapshot", "reset_prefix_cache"]


class UtilityCall(msgspec.Struct, frozen=True, tag="call"):
    """Ask for something outside a request, answered at the next step border."""

    call_id: int
    method: UtilityMethod
    preempt_running: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process after the running step."""


ToCore = AddRequests | AbortRequests | UtilityCall | Shutdown

# Core -> client


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and warm; requests may come."""

    info: EngineInfo


class CoreOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of a step, or an empty heartbeat."""

    outputs: list[EngineOutput]
    stats: EngineStats


class UtilityResult(msgspec.Struct, frozen=True, tag="result"):
    """Answer to a `UtilityCall`: a snapshot, or whether a reset succeeded."""

    call_id: int
    snapshot: PoolSnapshot | None = None
    ok: bool | None = None


class CoreDead(msgspec.Struct, frozen=True, tag="dead"):
    """The core cannot go on; the last message it sends."""

    error: str


FromCore = CoreReady | CoreOutputs | UtilityResult | CoreDead

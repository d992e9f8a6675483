"""What crosses the border of the engine core: requests in, tokens and statistics out.

All of it is msgpack-encodable; the process that carries it is worker/core.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.sampling_params import SamplingParams
from engine.residency import BlockAges
from kvindex.hit_rule import CacheLayout

SleepLevel = Literal[1, 2]
"""1: the memory of the KV cache is given back. 2: that of the weights too."""

PauseMode = Literal["new", "all"]
"""`new`: what runs goes on, nothing new is admitted (a drain). `all`: nothing is computed."""

FinishReason = Literal["stop", "length", "abort", "error"]


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter that a request runs with: its name, and the folder with its weights.

    `digest` is the sha256 of its files when it was given that name; "" takes what is there.
    """

    name: str
    path: str
    digest: str = ""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one client request.

    `request_id` is unique among live requests (`{id}-{choice}`). `resume_token_ids` were emitted
    elsewhere before: they count as output, not as prompt. `seed` of `sampling` is always set.
    `prompt_is_open`: more of it comes with ExtendPrompt; what is known is computed meanwhile.
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
    prompt_is_open: bool = False
    lora: LoRARequest | None = None


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request after a step.

    `num_cached_tokens` comes once, with the first output: the prompt tokens not computed because
    their blocks were cached at first admission. `stop_token_id` names the stop token, if one
    ended it (it is the last of `token_ids`); `logprobs` has an entry for each of `token_ids`, if
    they were asked for; `prompt_logprobs` comes once, an entry for each prompt token but the
    first. `finish_reason` None means "more will come". With
    `finish_reason` "error", `error` says why and `error_kind` is a kind of engine/frontend/errors.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    error_kind: str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters and gauges of one engine; `*_total` only grow.

    `num_preempted` of the waiting requests have run before.
    `step` counts executed steps and heartbeats alike: a front whose core stops counting is dead.
    `spec_*`: rows of guesses that were verified, the guesses in them, those that became output,
    and of these the ones in each place of their row.
    """

    step: int = 0
    block_ages: BlockAges = msgspec.field(default_factory=BlockAges)
    pause_mode: PauseMode | None = None
    sleep_level: SleepLevel | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    queued_prefill_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    padding_tokens_total: int = 0
    preemptions_total: int = 0
    evictions_total: int = 0
    num_host_blocks: int = 0
    num_host_cached_blocks: int = 0
    host_stores_total: int = 0
    host_loads_total: int = 0
    resyncs_total: int = 0
    spec_drafts_total: int = 0
    spec_draft_tokens_total: int = 0
    spec_accepted_tokens_total: int = 0
    spec_accepted_at_total: list[int] = []
    busy_s_total: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class TenantStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tenant's part of an engine's counters, in tokens, and the blocks that it holds now."""

    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    evictions_total: int = 0
    num_held_blocks: int = 0


class EventPlaces(msgspec.Struct, frozen=True):
    """Where one stream of KV events is published and replayed."""

    endpoint: str
    replay_endpoint: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine core says of itself once it can serve.

    `events` are for our own ingesters, `announced` for routers of other make; None: nowhere.
    `cache_layout` None: one cache group, and every layer reads the whole past.
    """

    boot_ns: int
    num_blocks: int
    block_size: int
    max_model_len: int
    known_answer: bytes
    events: EventPlaces | None = None
    announced: EventPlaces | None = None
    execution_digest: str = ""
    vocab_size: int = 0
    cache_layout: CacheLayout | None = None


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


class ExtendPrompt(msgspec.Struct, frozen=True, tag="extend"):
    """Append tokens to an open prompt; ids that are not live are ignored.

    The last part closes it: only then is anything sampled.
    """

    request_id: str
    token_ids: list[int]
    is_last: bool = False


class TakeSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Answered by a PoolSnapshot."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Answered by whether it was done; see Scheduler.reset_prefix_cache."""

    preempt_running: bool


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Answered by True, once it holds; pausing again changes the mode."""

    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Answered by True."""


class FallAsleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Answered by a SleepAnswer once it sleeps; see EngineCore.sleep."""

    level: SleepLevel


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Answered by True once it is awake."""


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Answered by a SleepAnswer once it is awake with the weights of that folder, or the old."""

    model_folder: str


class SleepAnswer(msgspec.Struct, frozen=True):
    """What the core is now, and why it could not do what was asked, None if it did."""

    info: EngineInfo
    problem: str | None = None


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    """Answered by the blocks that the pool then has; see EngineCore.resize."""

    num_blocks: int


class AskTenantStats(msgspec.Struct, frozen=True, tag="tenant_stats"):
    """Answered by TenantStats by tenant, "" for requests without one."""


Utility = (
    TakeSnapshot
    | ResetPrefixCache
    | Pause
    | Resume
    | Resize
    | AskTenantStats
    | FallAsleep
    | WakeUp
    | UpdateWeights
)


class UtilityCall(msgspec.Struct, frozen=True, tag="call"):
    """Ask for something outside a request, answered at the next step border."""

    call_id: int
    utility: Utility


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process after the running step."""


ToCore = AddRequests | ExtendPrompt | AbortRequests | UtilityCall | Shutdown

# Core -> client


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and warm; requests may come."""

    info: EngineInfo


class CoreOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of a step, or an empty heartbeat."""

    outputs: list[EngineOutput]
    stats: EngineStats


class UtilityResult(msgspec.Struct, frozen=True, tag="result"):
    """Answer to a `UtilityCall`, encoded; its type is that of the utility's answer."""

    call_id: int
    value: msgspec.Raw


class CoreDead(msgspec.Struct, frozen=True, tag="dead"):
    """The core cannot go on; the last message it sends."""

    error: str


FromCore = CoreReady | CoreOutputs | UtilityResult | CoreDead

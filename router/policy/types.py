"""What a placement decision is made of, and what comes out of it.

Plain values: nothing here knows HTTP, Redis, a clock or how a policy weighs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvindex.index import Target, TrustMode

Exclusion = Literal[
    "tried",
    "draining",
    "breaker_open",
    "too_short",
    "not_isolating",
    "other_execution",
    "saturated",
    "lapsed",
]
"""Why a target was not considered; `lapsed` ones serve only when no live target is left."""

BreakerState = Literal["closed", "open", "half_open"]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to place one request.

    `num_total_tokens` is prompt plus the output that the client asked for, as far as it did.
    `block_size` None: the prompt has no hash chain, and `num_prompt_tokens` is an estimate.
    `hashes` are those of its full blocks. `isolated`: only targets that honour a cache salt may
    serve it. `tried` names the replicas that have failed this request before. `execution` is set
    when an answer is gone on with: only targets of that execution digest give the same tokens.
    Requests of one `session` belong together. Lower `priority` is more urgent; `weight` is that of
    the tenant.
    """

    request_id: str
    tenant: str
    model: str
    num_prompt_tokens: int
    num_total_tokens: int
    block_size: int | None = None
    hashes: tuple[bytes, ...] = ()
    isolated: bool = False
    attempt: int = 1
    tried: frozenset[str] = frozenset()
    execution: str | None = None
    session: str | None = None
    priority: int = 0
    weight: float = 1.0


class TargetView(msgspec.Struct, frozen=True, kw_only=True):
    """One target as the fleet view and the index describe it at this moment.

    `reserved_prefill_tokens`, `num_reserved` and `num_reserved_blocks` are the work of other
    gateways. `live` is False when neither lease nor probe vouches for it. `kv_tokens` is what its
    KV cache holds, None if unknown, and `kv_usage` the share of that which running requests hold.
    Its hits are multiples of `hit_granularity` tokens, None for the block size; the last
    `host_blocks` of what is matched are in host memory.
    `max_model_len` None is unknown. `isolates`: it honours `cache_salt`. `execution` None: it
    cannot go on with what another began. The rate is tokens per second, None when never measured.
    """

    target: Target
    mode: TrustMode = "FALLBACK"
    matched_blocks: int = 0
    pending_blocks: int = 0
    hit_granularity: int | None = None
    host_blocks: int = 0
    reserved_prefill_tokens: int = 0
    num_reserved: int = 0
    num_reserved_blocks: int = 0
    kv_tokens: int | None = None
    kv_usage: float = 0.0
    prefill_tokens_per_s: float | None = None
    max_model_len: int | None = None
    isolates: bool = True
    execution: str | None = None
    draining: bool = False
    live: bool = True


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A target with everything that a policy may weigh; what a decision record shows of it.

    `num_cached_tokens` are held now, `num_host_tokens` of them in host memory;
    `num_reusable_tokens` adds those that a running sibling is about to write, or leaves only what
    running requests hold where others will be evicted before it begins; of both, the first
    `num_shared_tokens` are what several conversations begin with. `num_active` and
    `queued_prefill_tokens` count the work sent by all gateways.
    `last_placed` is the ordinal of the newest placement there, 0 when there was none.
    `expected_s` is the estimate of seconds to the first token; of it, `queue_s` is spent waiting
    for the prefill of others, and `memory_s` for room in the KV cache. `spared`: what it holds is
    worth more than elsewhere, so new conversations had better start elsewhere (reuse_depth.py).
    """

    target: Target
    mode: TrustMode
    num_cached_tokens: int
    num_host_tokens: int = 0
    num_reusable_tokens: int
    num_shared_tokens: int = 0
    num_uncached_tokens: int
    num_active: int
    queued_prefill_tokens: int
    last_placed: int
    prefill_tokens_per_s: float
    queue_s: float
    memory_s: float = 0.0
    expected_s: float
    spared: bool = False
    excluded: Exclusion | None = None
    score: float | None = None


Rule = Literal["score", "affinity", "copy"]
"""Why this target: the policy's score; the most cached one, as all are busy; a copy on purpose."""


class Place(msgspec.Struct, frozen=True, kw_only=True, tag="place"):
    """Send it to `winner`; the planner counts it as running there until `finish`.

    `policy` and `params` rebuild the policy. Of the candidates, those with a score took part.
    """

    winner: Candidate
    policy: str
    candidates: tuple[Candidate, ...]
    params: dict[str, float] = {}
    rule: Rule = "score"


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Plan it again at its turn, see `Planner.next_turn`, or at the instant `until`.

    `reason`: others were there before; no target accepts; or the one that has its prefix will
    serve it earlier, in spite of its queue, than one that accepts now.
    """

    until: float
    reason: Literal["turn", "full", "affinity"]
    candidates: tuple[Candidate, ...] = ()


class Shed(msgspec.Struct, frozen=True, kw_only=True, tag="shed"):
    """Every target that could serve it is too far behind; `retry_after_s` may find room."""

    retry_after_s: float
    candidates: tuple[Candidate, ...]


class NoReplica(msgspec.Struct, frozen=True, kw_only=True, tag="no_replica"):
    """Nothing can serve it now; `retry_after_s` None when only an operator can change that."""

    reason: str
    retry_after_s: float | None
    candidates: tuple[Candidate, ...] = ()


Decision = Place | Wait | Shed | NoReplica
"""`Wait` only where the planner was given a queue."""


class ScorePart(msgspec.Struct, frozen=True):
    """One summand of a score."""

    name: str
    value: float


class Policy(Protocol):
    """How one tenant's requests choose among targets that all guards have let through."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...

    @property
    def weighs_cache(self) -> bool:
        """Whether the score tells a warm target from a cold one."""
        ...

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        """Rate the candidates; the lowest wins, None takes no part."""
        ...

    def tolerance(self, best: float) -> float:
        """Return how far above the best score a candidate still ties with it."""
        ...

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        """Take the score of one of the candidates that took part apart, for people."""
        ...

"""What is asked of a live fleet and what it answers, as far as a replay uses it.

Plain values; fields that nobody here reads are ignored. It knows no HTTP.
"""

from __future__ import annotations

import msgspec

from router.policy.types import Decision, PlanRequest

_WAITED_S = 0.5


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask for: a prompt of token ids and an answer of exactly so many tokens."""

    model: str
    prompt: list[int]
    num_output_tokens: int
    seed: int = 0
    session: str | None = None
    priority: int = 0


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What a client saw of one completion; `error` is set when it was not answered.

    `sent_at` is a monotonic instant; `ttft_s` and `token_at` count from there. `token_at` are the
    instants of the chunks.
    """

    sent_at: float
    status: int
    error: str | None = None
    request_id: str | None = None
    replica: str | None = None
    num_predicted_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    token_at: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.token_at[0] if self.token_at else None


class LiveAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the gateway."""

    decision: Decision
    request: PlanRequest | None = None


class LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What of a gateway's decision record is used.

    It ended `at` (seconds since the Unix epoch) after `duration_s`; `queue_s` of that passed until
    it was placed, None when it never was.
    """

    request_id: str
    unique_id: str
    tenant: str
    at: float
    duration_s: float
    queue_s: float | None = None
    attempts: tuple[LiveAttempt, ...] = ()

    @property
    def came_at(self) -> float:
        """When the gateway got it, in seconds since the Unix epoch."""
        return self.at - self.duration_s

    @property
    def placed_at(self) -> float:
        """When it was placed, or came if it never was; seconds since the Unix epoch."""
        return self.came_at + (self.queue_s or 0.0)

    @property
    def has_waited(self) -> bool:
        """Whether it had to wait for a place; what is shorter is the gateway's own work."""
        return (self.queue_s or 0.0) > _WAITED_S


class LiveReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the gateway sees it; `max_blocks` None where it does not tell."""

    id: str
    live: bool
    mode: str
    served_models: tuple[str, ...]
    max_model_len: int | None = None
    max_blocks: int | None = None
    num_blocks: dict[str, int] | None = None

    @property
    def num_held(self) -> int:
        """How many blocks the index counts there."""
        return sum((self.num_blocks or {}).values())


class LiveFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/replicas."""

    gateway: str
    replicas: tuple[LiveReplica, ...]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt one target holds."""

    target: str
    matched_blocks: int


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to POST /admin/index/explain."""

    num_blocks: int
    targets: tuple[Holding, ...]

"""One client request on its way through the gateway, and what is noted down about it.

Plain state: dispatch moves it on, settle reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.frontend.errors import RequestError
from router.config import TenantConfig
from router.policy.types import Decision, Place
from router.request.body import Endpoint, Fields, Head
from router.request.prepare import Prepared


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and what came of it; `failure` None when it was served or never placed."""

    attempt: int
    decision: Decision
    failure: str | None = None


class RealisedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the replica says it computed; `cached_tokens` None when it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that has been authenticated and read.

    `request_id` is what the client sees; `unique_id` is what replicas and reservations go by, as
    two clients may send the same id. `late_error` ended a stream whose status line was out already.
    Instants are monotonic.
    """

    request_id: str
    unique_id: str
    tenant: TenantConfig
    key_alias: str
    endpoint: Endpoint
    head: Head
    fields: Fields
    body: bytes
    cache_salt: str
    seed: int
    started_at: float
    model_is_known: bool = False
    prepared: Prepared | None = None
    first_token_at: float | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    usage: RealisedUsage | None = None
    late_error: RequestError | None = None

    @property
    def is_isolated(self) -> bool:
        """Whether only replicas that honour a cache salt may serve it."""
        return self.tenant.isolation != "shared" or self.head.cache_salt is not None

    @property
    def placed(self) -> Place | None:
        """The newest placement, None before the first."""
        for record in reversed(self.attempts):
            if isinstance(record.decision, Place):
                return record.decision
        return None

    @property
    def tried(self) -> frozenset[str]:
        """The replicas that have failed it."""
        return frozenset(
            record.decision.winner.target.replica
            for record in self.attempts
            if record.failure is not None and isinstance(record.decision, Place)
        )

"""One client request on its way through the gateway, and what is noted down about it.

Plain state: dispatch moves it on, settle reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from engine.frontend.errors import RequestError
from kvindex.index import TargetMatch
from router.config import TenantConfig
from router.fleet.replica import Replica
from router.policy.types import Decision, Place, PlanRequest
from router.request.body import Endpoint, Fields, Head
from router.request.chunks import Chunk
from router.request.prepare import Prepared
from router.request.resume import Transcript
from router.request.usage import RealisedUsage
from router.tenancy.tenancy import Grant
from router.tenancy.tenants import Identity


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and what came of it; `failure` None when it was served or never placed.

    `request` is what the planner was asked, without the prompt's hashes.
    """

    attempt: int
    decision: Decision
    request: PlanRequest | None = None
    failure: str | None = None


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that has been authenticated and read.

    `request_id` is what the client sees; `unique_id` is what replicas and reservations go by, as
    two clients may send the same id. `late_error` ended a stream whose status line was out already.
    `model_is_allowed`: its key may use the model, if it exists.
    `asked_model` is the name that the client gave, perhaps an alias of the served `head.model`.
    `grant` is set once the tenant's limits have let it in, `placed_at` when a replica was found.
    `served` is the placement whose replica gave the first output, and tells what it found cached.
    `block_size` is that of its model's pool, None without one; `record_number` is the recorder's.
    `matching` is what the index is being asked for the first placement, until that takes it.
    `failed_by` are the replicas that have failed it, `num_deaths` counts those that died while it
    ran there. Instants are monotonic.
    """

    request_id: str
    unique_id: str
    identity: Identity
    endpoint: Endpoint
    head: Head
    fields: Fields
    body: bytes
    cache_salt: str
    seed: int
    started_at: float
    asked_model: str
    model_is_allowed: bool
    model_is_known: bool = False
    prepared: Prepared | None = None
    block_size: int | None = None
    record_number: int | None = None
    matching: asyncio.Task[list[TargetMatch] | None] | None = None
    grant: Grant | None = None
    placed_at: float | None = None
    first_token_at: float | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    failed_by: list[Replica] = field(default_factory=list)
    usage: RealisedUsage | None = None
    late_error: RequestError | None = None
    transcript: Transcript = field(default_factory=Transcript)
    served: Place | None = None
    served_by_foreign: bool = False
    num_output_chunks: int = 0
    num_deaths: int = 0
    num_resumes: int = 0

    @property
    def tenant(self) -> TenantConfig:
        """Whose request it is."""
        return self.identity.tenant

    @property
    def key_alias(self) -> str:
        """The alias of the key, "" when there is none."""
        return self.identity.key_alias

    @property
    def is_isolated(self) -> bool:
        """Whether only replicas that honour a cache salt may serve it."""
        return self.tenant.isolation != "shared" or self.head.cache_salt is not None

    @property
    def session(self) -> str | None:
        """What the client says that belongs together."""
        return self.head.prompt_cache_key

    @property
    def priority(self) -> int:
        """How urgent it is, lower is more; never more so than its tenant may be."""
        return max(self.head.priority or 0, self.tenant.priority_ceiling)

    @property
    def queue_s(self) -> float | None:
        """How long it waited for a place, None when it got none."""
        return None if self.placed_at is None else self.placed_at - self.started_at

    @property
    def ttft_s(self) -> float | None:
        """Seconds to its first token, None when none came."""
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer as the replica counts them, else those that came with their ids."""
        return self.usage.completion_tokens if self.usage else self.transcript.num_tokens

    @property
    def placed(self) -> Place | None:
        """The newest placement, None before the first."""
        for record in reversed(self.attempts):
            if isinstance(record.decision, Place):
                return record.decision
        return None

    def took(self, chunks: Sequence[Chunk], *, execution: str | None) -> None:
        """Note chunks that have been passed on; `execution` is what computed them."""
        self.transcript.take(chunks, execution=execution)
        for chunk in chunks:
            # Where tokens come with their ids, the transcript has counted them.
            if chunk.prefixfleet is UNSET and chunk.has_output:
                self.num_output_chunks += 1
            if chunk.usage:
                self.usage = chunk.realised

    def forget_output(self) -> None:
        """Drop what an attempt has answered, because the next one begins anew."""
        self.transcript.clear()
        self.first_token_at = None
        self.served = None
        self.usage = None

"""What an index answers: which target holds how much of a hash chain, and how loaded it is.

Types and the asynchronous face that `RedisIndex` and `AsyncMemoryIndex` implement; one contract
suite runs over both. It knows nothing of tenants, policies or HTTP, and it never sees a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import msgspec

from kvindex.hit_rule import CacheLayout

TrustMode = Literal["EXACT", "DEGRADED", "FALLBACK"]
TRUST_MODES: tuple[TrustMode, ...] = get_args(TrustMode)
"""From the most trusted to the least."""

Tier = Literal["gpu", "host"]
OpKind = Literal["stored", "removed", "cleared"]


class Target(msgspec.Struct, frozen=True, order=True):
    """One schedulable engine: a replica and its data-parallel rank."""

    replica: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.replica}/{self.dp_rank}"


class IndexOp(msgspec.Struct, frozen=True, kw_only=True):
    """One ordered change of an inventory; `cleared` concerns every tier and carries no hashes."""

    kind: OpKind
    hashes: tuple[bytes, ...] = ()
    group: int = 0
    tier: Tier = "gpu"


class SequencedOps(msgspec.Struct, frozen=True):
    """The operations of one event batch, under its sequence number."""

    seq: int
    ops: tuple[IndexOp, ...]


class ApplyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How far an `apply` got.

    `applied`: everything given is in. `gap`: stopped before a missing sequence number.
    `fenced`: the epoch is not the target's current one, or its lease lapsed; nothing was done.
    `applied_seq` is the last sequence number in the index, None when there is none.
    """

    status: Literal["applied", "gap", "fenced"]
    applied_seq: int | None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself with every lease renewal."""

    mode: TrustMode = "FALLBACK"
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    draining: bool = False


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a gateway has just sent, or is about to send, to a target.

    `pending` holds the hashes that its prefill will write, in chain order after the matched ones;
    they count as pending (not as held) for `pending_ttl_s`. The whole reservation lapses with the
    gateway's lease, `touch_gateway`.
    """

    request_id: str
    attempt: int
    target: Target
    gateway: str
    prefill_tokens: int
    num_blocks: int
    pending: tuple[bytes, ...] = ()
    pending_ttl_s: float = 30.0


class PrefillEnd(msgspec.Struct, frozen=True):
    """The first token of a reserved request has come: its prefill tokens are counted no more."""

    target: Target
    request_id: str
    attempt: int


class Release(msgspec.Struct, frozen=True):
    """A reserved request has ended; unless its blocks were `written`, its pending ones go too.

    Written blocks stay pending until their time is over: their events may be on the way.
    """

    target: Target
    request_id: str
    attempt: int
    written: bool


Announcement = Reservation | PrefillEnd | Release


class TargetMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of one live target, for one chain of hashes.

    `matched_blocks` is the hit that the engine would give, counted from the root; the last
    `host_blocks` of them are not on the gpu. `pending_blocks` are those directly after them that
    some reserved request is about to write. `reserved_*` sum the reservations of live gateways.
    """

    target: Target
    epoch: int
    matched_blocks: int
    host_blocks: int = 0
    pending_blocks: int = 0
    reserved_prefill_tokens: int = 0
    reserved_blocks: int = 0
    num_reserved: int = 0
    report: LoadReport


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """One target's inventory at a glance, for `index status`."""

    target: Target
    epoch: int
    applied_seq: int | None
    num_blocks: dict[str, int]
    lease_left_s: float
    report: LoadReport


class PrefixIndex(Protocol):
    """The shared index of one pool: (served model, model identity, hash scheme).

    Every method raises DependencyError when the store cannot be reached; none retries for ever.
    """

    async def register(
        self, target: Target, *, boot_ns: int, lease_s: float, layout: CacheLayout | None = None
    ) -> int:
        """Open a new epoch, max(stored + 1, boot_ns), with an empty inventory; return it.

        `layout` None: one cache group, and every layer reads the whole past.
        """
        ...

    async def renew(
        self, target: Target, epoch: int, *, lease_s: float, report: LoadReport
    ) -> bool:
        """Extend the lease; False when it has lapsed or the epoch is old: register again."""
        ...

    async def deregister(self, target: Target, epoch: int) -> None:
        """Drop a target at once; an old epoch changes nothing."""
        ...

    async def apply(
        self, target: Target, epoch: int, batches: Sequence[SequencedOps]
    ) -> ApplyResult:
        """Apply batches in order, atomically, each at most once.

        The first batch after `register` may carry any sequence number only if it is 0; otherwise
        a snapshot must come first.
        """
        ...

    async def load_snapshot(
        self, target: Target, epoch: int, *, seq: int, ops: Sequence[IndexOp]
    ) -> bool:
        """Replace the inventory by `ops` (all `stored`) as of sequence `seq`; False when fenced.

        `seq` is the last batch that the snapshot includes, -1 when none was published yet.
        """
        ...

    async def match(self, hashes: Sequence[bytes]) -> list[TargetMatch]:
        """Return every live target with what it holds of the chain, in one round trip."""
        ...

    async def touch_gateway(self, gateway: str, *, lease_s: float) -> None:
        """Keep a gateway's reservations counted for another `lease_s`."""
        ...

    async def reserve(self, reservation: Reservation) -> None:
        """Count the work at once; the same (request, attempt) counts once."""
        ...

    async def release_prefill(self, target: Target, request_id: str, attempt: int) -> None:
        """Stop counting the prefill tokens: the first token has come. Idempotent."""
        ...

    async def release(
        self, target: Target, request_id: str, attempt: int, *, written: bool
    ) -> None:
        """Stop counting the request; unless its blocks were `written`, withdraw its pending ones.

        Idempotent; releasing what was never reserved does nothing.
        """
        ...

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Do any number of these in order, as the three methods above do each."""
        ...

    async def states(self) -> list[TargetState]:
        """List the live targets."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...

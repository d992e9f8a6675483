"""One replica as the gateway knows it, whether it registered itself or was configured.

It is what the fleet view remembers between polls; who is chosen is the planner's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvindex.index import LoadReport, Target, TargetMatch
from kvindex.registry import ReplicaKind, ReplicaRecord
from router.fleet.pools import Pool
from router.policy.types import TargetView


@dataclass(slots=True, kw_only=True)
class Replica:
    """Identity, address and last known condition.

    `record` and `pool` are those of a registered replica, None for a configured one; `token` is
    what it wants as a bearer token. `live`: its lease or its last probe was good. `num_blocks` in
    the index by tier; `seen_at` is monotonic.
    """

    id: str
    kind: ReplicaKind
    url: str
    served_models: tuple[str, ...] = ()
    max_model_len: int | None = None
    record: ReplicaRecord | None = None
    pool: Pool | None = None
    token: str | None = None
    live: bool = False
    seen_at: float = 0.0
    reason: str = ""
    report: LoadReport = field(default_factory=LoadReport)
    num_blocks: dict[str, int] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every call to it carries."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def targets(self) -> list[Target]:
        """Its schedulable engines, one per data-parallel rank."""
        ranks = self.record.dp_size if self.record is not None else 1
        return [Target(self.id, rank) for rank in range(ranks)]

    def view(self, target: Target, match: TargetMatch | None, *, index_is_up: bool) -> TargetView:
        """Describe one of its targets to the planner.

        While the index answers, it alone says who is alive and what is cached. While it does
        not, the last known condition has to do, without any credit for cached blocks.
        """
        report = match.report if match is not None else self.report
        registered = self.record is not None
        return TargetView(
            target=target,
            mode=report.mode if match is not None else "FALLBACK",
            matched_blocks=match.matched_blocks if match is not None else 0,
            pending_blocks=match.pending_blocks if match is not None else 0,
            reserved_prefill_tokens=match.reserved_prefill_tokens if match is not None else 0,
            num_reserved=match.num_reserved if match is not None else 0,
            prefill_tokens_per_s=report.prefill_tokens_per_s or None,
            decode_tokens_per_s=report.decode_tokens_per_s or None,
            max_model_len=self.max_model_len,
            isolates=self.kind != "openai",
            draining=report.draining,
            live=match is not None if registered and index_is_up else self.live,
        )

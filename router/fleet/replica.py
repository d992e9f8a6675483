"""One replica as the gateway knows it, whether it registered itself or was configured.

It is what the fleet view remembers between polls; who is chosen is the planner's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvindex.index import TRUST_MODES, LoadReport, Target, TargetMatch
from kvindex.registry import ReplicaKind, ReplicaRecord
from router.fleet.pools import Pool
from router.policy.types import TargetView


@dataclass(slots=True, kw_only=True)
class Replica:
    """Identity, address and last known condition.

    `num_restarts` counts the processes that took its place under its name since it was first seen.
    `record` and `pool` are those of a registered replica, None for a configured one; `token` is
    what it wants as a bearer token. `live`: its lease or its last probe was good; `seen_at` is
    monotonic. `rank_reports` and `rank_blocks` (blocks in the index by tier) are by data-parallel
    rank, as far as the index has told.
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
    num_restarts: int = 0
    reason: str = ""
    rank_reports: dict[int, LoadReport] = field(default_factory=dict)
    rank_blocks: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def report(self) -> LoadReport:
        """The report of the whole replica: its ranks together, the worst one's mode."""
        return combined_report(list(self.rank_reports.values()))

    @property
    def num_blocks(self) -> dict[str, int] | None:
        """Blocks in the index by tier, over all ranks; None when the index knows nothing."""
        if not self.rank_blocks:
            return None
        tiers: Counter[str] = Counter()
        for blocks in self.rank_blocks.values():
            tiers.update(blocks)
        return dict(tiers)

    @property
    def headers(self) -> dict[str, str]:
        """What every call to it carries."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def headers_for(self, target: Target) -> dict[str, str]:
        """What a request for one of its engines carries: a vLLM takes the rank in a header."""
        if self.kind != "vllm" or self.record is None or self.record.dp_size == 1:
            return self.headers
        return {**self.headers, "x-data-parallel-rank": str(target.dp_rank)}

    @property
    def targets(self) -> list[Target]:
        """Its schedulable engines, one per data-parallel rank."""
        ranks = self.record.dp_size if self.record is not None else 1
        return [Target(self.id, rank) for rank in range(ranks)]

    @property
    def execution(self) -> str | None:
        """What its outputs depend on besides the request; None of an engine that cannot resume."""
        if self.record is None or self.kind != "prefixfleet":
            return None
        return self.record.execution_digest

    @property
    def kv_tokens(self) -> int | None:
        """What the KV cache of each of its engines holds, None while that is unknown."""
        record = self.record
        if record is None or not record.num_blocks:
            return None
        return record.num_blocks * (record.hit_granularity or record.hash_scheme.block_size)

    def view(self, target: Target, match: TargetMatch | None, *, index_is_up: bool) -> TargetView:
        """Describe one of its targets to the planner.

        While the index answers, it alone says who is alive and what is cached. While it does
        not, the last known condition has to do, without any credit for cached blocks.
        """
        last_known = self.rank_reports.get(target.dp_rank, LoadReport())
        report = match.report if match is not None else last_known
        registered = self.record is not None
        return TargetView(
            target=target,
            mode=report.mode if match is not None else "FALLBACK",
            matched_blocks=match.matched_blocks if match is not None else 0,
            host_blocks=match.host_blocks if match is not None else 0,
            pending_blocks=match.pending_blocks if match is not None else 0,
            hit_granularity=self.record.hit_granularity if self.record is not None else None,
            reserved_prefill_tokens=match.reserved_prefill_tokens if match is not None else 0,
            num_reserved=match.num_reserved if match is not None else 0,
            num_reserved_blocks=match.reserved_blocks if match is not None else 0,
            kv_tokens=self.kv_tokens,
            kv_usage=report.kv_usage,
            prefill_tokens_per_s=report.prefill_tokens_per_s or None,
            max_model_len=self.max_model_len,
            isolates=self.kind != "openai",
            execution=self.execution,
            draining=report.draining,
            live=match is not None if registered and index_is_up else self.live,
        )


def combined_report(ranks: Sequence[LoadReport]) -> LoadReport:
    """Sum up the ranks of a replica; mode and reason are those of the least trusted one."""
    if not ranks:
        return LoadReport()
    worst = max(ranks, key=lambda report: TRUST_MODES.index(report.mode))
    return LoadReport(
        mode=worst.mode,
        reason=worst.reason,
        num_running=sum(report.num_running for report in ranks),
        num_waiting=sum(report.num_waiting for report in ranks),
        queued_prefill_tokens=sum(report.queued_prefill_tokens for report in ranks),
        kv_usage=sum(report.kv_usage for report in ranks) / len(ranks),
        prefill_tokens_per_s=sum(report.prefill_tokens_per_s for report in ranks),
        decode_tokens_per_s=sum(report.decode_tokens_per_s for report in ranks),
        draining=any(report.draining for report in ranks),
    )

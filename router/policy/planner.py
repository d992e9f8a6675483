"""The planner: where a request goes. Synchronous, pure, and the only place of every guard.

State in, decision out: the gateway and the simulator drive the same object. It knows no HTTP, no
Redis and no clock; it is told what happened through `first_token` and `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from router.policy.candidates import comparable_rates, make_candidate
from router.policy.choice import choose, scored, without, without_holders
from router.policy.fair_share import Charged, Rival
from router.policy.guards import Guards
from router.policy.ledger import Entry, Ledger
from router.policy.prefix_heat import HALF_LIFE_S, PrefixHeat
from router.policy.queueing import ModelQueue, QueueConfig
from router.policy.refusal import refusal
from router.policy.replication import Replication, ReplicationConfig
from router.policy.reuse_depth import ReuseDepth
from router.policy.types import (
    BreakerState,
    Candidate,
    Decision,
    Place,
    PlanRequest,
    Policy,
    Rule,
    Shed,
    TargetView,
    Wait,
)

Outcome = Literal["answered", "failed", "abandoned"]
"""How an attempt ended for its replica: it spoke (4xx too), it failed, or nobody can tell."""


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the guards, and the prefill rate (tokens/s) assumed where no target reports any.

    Targets with more than `max_queue_s` of prefill before them take nothing. Once every target has
    `saturation_s` of it, requests stay with their prefix, because moving them frees nobody.
    `max_siblings` requests at a time may count on a prefix that one of them is computing. Without
    `queue` nothing ever waits, without `replication` no prefix is copied on purpose.
    """

    max_queue_s: float = 120.0
    prefill_tokens_per_s: float = 1000.0
    saturation_s: float | None = None
    max_siblings: int | None = None
    queue: QueueConfig | None = None
    replication: ReplicationConfig | None = None


class Planner:
    """Places requests by the policy of their tenant.

    Order of the guards: tried, not isolating, other execution, too short, draining, breaker,
    saturated, lapsed. What is left and accepts more work now is scored.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        config: PlannerConfig | None = None,
        gateway: str = "",
    ) -> None:
        """Start with nothing running; `gateway` makes the last tie-break differ between gateways.

        Otherwise a burst that hits idle gateways at once would go to one target.
        """
        self._policies = policies
        self._config = config or PlannerConfig()
        self._gateway = gateway
        self._guards = Guards(self._config.max_queue_s)
        self._queues: dict[str, ModelQueue] = {}
        replication = self._config.replication
        self._replication = Replication(replication) if replication is not None else None
        self._heat = PrefixHeat(replication.half_life_s if replication is not None else HALF_LIFE_S)
        self._reuse = ReuseDepth()
        self.ledger = Ledger()

    def use_policies(self, policies: Mapping[str, Policy]) -> None:
        """Replace the policies of these tenants; what is running and what was learned stays."""
        self._policies = {**self._policies, **policies}

    def plan(self, request: PlanRequest, views: Sequence[TargetView], now: float) -> Decision:
        """Decide, and on `Place` count the request as running there until `finish`; O(views).

        A second attempt waits for nobody: its client has waited already.
        """
        queue = self._queue(request.model) if request.attempt == 1 else None
        if queue is not None:
            stopped = queue.stopped(request, now)
            if stopped is not None:
                return stopped
        candidates = self._candidates(request, views, now)
        open_ones = [c for c in candidates if c.excluded is None]
        if not open_ones:
            open_ones = [c for c in candidates if c.excluded == "lapsed"]
        decision: Decision
        if not open_ones:
            decision = refusal(
                candidates,
                max_queue_s=self._config.max_queue_s,
                reopens_in_s=lambda replica: self._guards.reopens_in_s(replica, now),
            )
        else:
            decision = self._decide(request, open_ones, candidates, queue, now)
            if isinstance(decision, Place):
                winner = decision.winner
                (kv_tokens,) = [v.kv_tokens for v in views if v.target is winner.target]
                self._reuse.placed(request, winner, kv_tokens)
        if queue is not None:
            queue.end_turn(request.request_id)
            if not isinstance(decision, Wait):
                queue.leave(request.request_id)
        return decision

    def next_turn(self, model: str, now: float) -> str | None:
        """Return the waiting request that is to be planned now; it has the turn until then.

        None when nobody waits, when somebody has the turn, or when no target accepts.
        """
        queue = self._queues.get(model)
        return queue.next_turn(now) if queue is not None else None

    def next_instant(self, model: str) -> float | None:
        """Return when to ask for the next turn although nothing has happened, if anybody waits."""
        queue = self._queues.get(model)
        return queue.next_instant() if queue is not None else None

    def look_again(self) -> None:
        """Let turns be tried again: work has ended somewhere, or a target is there that was not."""
        for queue in self._queues.values():
            queue.blocked_until = 0.0

    def leave(self, model: str, request_id: str) -> None:
        """Forget a waiting request whose client has gone."""
        queue = self._queues.get(model)
        if queue is not None:
            queue.leave(request_id)

    def charged(self) -> dict[str, dict[str, Charged]]:
        """Return, by model and tenant, what was charged here while somebody had to wait."""
        found = {model: queue.share.charged() for model, queue in self._queues.items()}
        return {model: charged for model, charged in found.items() if charged}

    def hear(self, rivals: Mapping[str, Mapping[str, Rival]]) -> None:
        """Take in, by model and tenant, how the other gateways' queues have moved on."""
        for model in {*self._queues, *rivals}:
            queue = self._queue(model)
            if queue is not None:
                queue.share.hear(rivals.get(model, {}))

    def num_waiting(self, model: str) -> int:
        """Return how many requests of a model wait."""
        queue = self._queues.get(model)
        return len(queue.share) if queue is not None else 0

    def num_waiting_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return sum(queue.share.num_waiting(tenant) for queue in self._queues.values())

    def first_token(self, request_id: str, attempt: int) -> None:
        """Note that the prefill is over and the replica alive."""
        entry = self.ledger.end_prefill((request_id, attempt))
        self.look_again()
        if entry is not None:
            self._guards.succeeded(entry.target.replica)

    def finish(
        self,
        request_id: str,
        attempt: int,
        outcome: Outcome,
        now: float,
        *,
        num_output_tokens: int = 0,
    ) -> None:
        """Stop counting an attempt; finishing it twice is harmless.

        Output is charged to the tenant's share now, if it has waited for its turn.
        """
        entry = self.ledger.close((request_id, attempt))
        if entry is None:
            return
        self.look_again()
        if entry.model is not None:
            self._queues[entry.model].charge_output(entry.tenant, num_output_tokens)
        guards, replica = self._guards, entry.target.replica
        if outcome == "answered":
            self.ledger.accounts[entry.target].learn(
                num_output_tokens=num_output_tokens, duration_s=now - entry.placed_at
            )
            guards.succeeded(replica)
        elif outcome == "failed":
            guards.failed(replica, now, probe=entry.probe)
        else:
            guards.abandoned(replica, probe=entry.probe)

    def breaker_state(self, replica: str, now: float) -> BreakerState:
        """Return the state of a replica's breaker."""
        return self._guards.breaker_state(replica, now)

    def forget(self, replicas: Sequence[str]) -> None:
        """Drop what is remembered of replicas that have left the fleet; running work stays."""
        gone = set(replicas)
        self._guards.forget(gone)
        self._reuse.forget(gone)
        accounts = self.ledger.accounts
        for target in [t for t in accounts if t.replica in gone and not accounts[t].num_active]:
            del accounts[target]

    def _queue(self, model: str) -> ModelQueue | None:
        queue = self._queues.get(model)
        if queue is None and self._config.queue is not None:
            queue = self._queues[model] = ModelQueue(self._config.queue)
        return queue

    def _decide(
        self,
        request: PlanRequest,
        open_ones: Sequence[Candidate],
        candidates: Sequence[Candidate],
        queue: ModelQueue | None,
        now: float,
    ) -> Decision:
        policy = self._policies[request.tenant]
        if queue is not None:
            waiting = self._not_now(queue, policy, request, open_ones, candidates, now)
            if waiting is not None:
                return waiting
            open_ones = [c for c in open_ones if c.queue_s < queue.config.accept_s]
        pool, rule = self._within_saturation(policy, open_ones)
        rated = scored(policy, request, pool)
        winner = choose(rated, policy, rule=rule, gateway=self._gateway)
        copy = self._copy(policy, rated, winner, self._touch(request, candidates, now), now)
        if copy is not None:
            winner, rule = copy, "copy"
        self._open(request, winner, queue, now)
        return Place(
            winner=winner,
            policy=policy.name,
            params=params_of(policy),
            candidates=(*rated, *without(candidates, rated)),
            rule=rule,
        )

    def _open(
        self, request: PlanRequest, winner: Candidate, queue: ModelQueue | None, now: float
    ) -> None:
        is_charged = queue is not None and (queue.has(request.request_id) or queue.share.has_rivals)
        entry = Entry(
            winner.target,
            prefill_tokens=winner.num_uncached_tokens,
            hashes=request.hashes,
            placed_at=now,
            block_size=request.block_size or 0,
            num_loose_tokens=request.num_prompt_tokens
            - len(request.hashes) * (request.block_size or 0),
            probe=self._guards.sent(winner.target.replica, now),
            model=request.model if is_charged else None,
            tenant=request.tenant,
        )
        self.ledger.open((request.request_id, request.attempt), entry)
        if queue is not None:
            queue.placed(request, winner)

    def _not_now(
        self,
        queue: ModelQueue,
        policy: Policy,
        request: PlanRequest,
        open_ones: Sequence[Candidate],
        candidates: Sequence[Candidate],
        now: float,
    ) -> Wait | Shed | None:
        """Say whether a request has to wait for a target, or had better."""
        accept_s = queue.config.accept_s
        accepting = [c for c in open_ones if c.queue_s < accept_s]
        if len(accepting) == len(open_ones):
            return None
        if not accepting:
            until = now + min(c.queue_s for c in open_ones) - accept_s
            return queue.wait(request, "full", until, candidates, now)
        if not policy.weighs_cache:
            return None
        rated = scored(policy, request, open_ones)
        best = choose(rated, policy, rule="score", gateway=self._gateway)
        if best.queue_s < accept_s or not queue.may_stay(request.request_id, now):
            return None
        until = now + best.queue_s - accept_s
        return queue.wait(request, "affinity", until, candidates, now)

    def _within_saturation(
        self, policy: Policy, open_ones: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Rule]:
        """Keep to the warmest when all are busy, unless one is more than twice as busy as another.

        Nobody is idle then, so a request that moves only has its prefix computed again.
        """
        floor_s = self._config.saturation_s
        if floor_s is None or not policy.weighs_cache:
            return open_ones, "score"
        least_s = min([c.queue_s for c in open_ones])
        if least_s < floor_s:
            return open_ones, "score"
        return [c for c in open_ones if c.queue_s <= 2 * least_s], "affinity"

    def _touch(self, request: PlanRequest, candidates: Sequence[Candidate], now: float) -> float:
        """Count where a prompt parts from what is cached; return the heat there, 0 at its start."""
        most = max([c.num_cached_tokens for c in candidates])
        if request.attempt > 1 or not most:
            return 0.0
        assert request.block_size is not None, "what is cached has a chain"
        num_blocks = most // request.block_size
        return self._heat.touch(request.hashes[num_blocks - 1], num_blocks, now)

    def _copy(
        self,
        policy: Policy,
        rated: Sequence[Candidate],
        winner: Candidate,
        heat: float,
        now: float,
    ) -> Candidate | None:
        """Return the target that gets a copy of a hot prefix, None when it needs none now."""
        replication = self._replication
        if replication is None or not policy.weighs_cache:
            return None
        if max(c.num_cached_tokens for c in rated) < replication.config.min_tokens:
            return None
        others = without_holders(rated)
        holders = len(rated) - len(others)
        if not others or winner in others or not winner.num_active:
            return None
        if not replication.wants_copy(heat, num_holders=holders, now=now):
            return None
        replication.copied(now)
        return choose(others, policy, rule="copy", gateway=self._gateway)

    def _candidates(
        self, request: PlanRequest, views: Sequence[TargetView], now: float
    ) -> list[Candidate]:
        rates = comparable_rates(views, self._config.prefill_tokens_per_s)
        longest = max([0, *[view.matched_blocks for view in views]])
        longest = min(longest, len(request.hashes))
        num_shared = self._heat.num_shared_blocks(request.hashes, longest, now)
        num_shared_tokens = num_shared * (request.block_size or 0)
        is_deep, spared, max_siblings = self._reuse.is_deep, False, self._config.max_siblings
        found = []
        for view, rate in zip(views, rates, strict=True):
            candidate = make_candidate(
                request,
                view,
                self.ledger.account(view.target),
                prefill_rate=rate,
                num_shared_tokens=num_shared_tokens,
                spared=spared,
                max_siblings=max_siblings,
            )
            excluded = self._guards.exclusion(request, view, queue_s=candidate.queue_s, now=now)
            if excluded is None:
                spared = is_deep
            else:
                candidate = msgspec.structs.replace(candidate, excluded=excluded)
            found.append(candidate)
        return found


def params_of(policy: Policy) -> dict[str, float]:
    """Return the parameters that rebuild a policy."""
    return msgspec.structs.asdict(policy) if isinstance(policy, msgspec.Struct) else {}

"""One gateway's tenancy: who may come in, what is left of their limits, what they are charged.

Every route that spends engine time goes through `identify`, `reserve` and `settle`. A change made
on another gateway is seen by the next request here, because every claim's answer carries the
directory's version. It knows neither HTTP nor how requests are served.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from engine.frontend.errors import RequestError
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import DependencyError
from router.tenancy.exchange import Exchange
from router.tenancy.expected_output import ExpectedOutput
from router.tenancy.fleet_limiter import FleetLimiter
from router.tenancy.limit_reached import LimitReached
from router.tenancy.limits import Claim, Settlement, Verdict
from router.tenancy.live_directory import LiveDirectory
from router.tenancy.stores import TenancyStores
from router.tenancy.tenants import Identity, TenantDirectory
from router.tenancy.usage import UsageRecord

_REFUSAL_MEMORY_S = 1.0
"""How long a refusal is told again without asking; a budget may get something back meanwhile."""

log = logging.getLogger("prefixfleet.router.tenancy")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request was granted: whose it is, its claim, and what was left at that moment."""

    identity: Identity
    claim: Claim
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _Refused:
    """The last lasting refusal of a tenant."""

    identity: Identity
    reached: LimitReached
    at: float


class Tenancy:
    """Identities, limits and usage of one gateway; `live` holds its tenants and keys.

    `spawn` runs what must outlive the request that caused it.
    """

    def __init__(
        self,
        live: LiveDirectory,
        *,
        stores: TenancyStores,
        clock: Clock,
        lease_s: float,
        exchange: Exchange,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.live = live
        self.limiter = stores.limiter
        self.usage = stores.usage
        self._clock = clock
        self._lease_s = lease_s
        self._exchange = exchange
        self._spawn = spawn
        self._expected = ExpectedOutput()
        self._refused: dict[str, _Refused] = {}
        self._ended: list[Settlement] = []

    @property
    def directory(self) -> TenantDirectory:
        """The tenants and keys of this moment."""
        return self.live.current

    async def start(self) -> None:
        """Take what the last run knew, then what the store says; without a store that is all."""
        num_gateways = await self.live.start()
        if isinstance(self.limiter, FleetLimiter):
            self.limiter.num_gateways = num_gateways
        await self.poll()

    async def poll(self) -> None:
        """Renew the lease, tell and hear the other gateways, and follow the store."""
        beat = await self.limiter.heartbeat(lease_s=self._lease_s)
        notice = self._exchange.notice()
        self._exchange.take(notice, await self.limiter.exchange(notice))
        await self.catch_up()
        await self.live.note_gateways(beat.num_gateways)

    async def close(self) -> None:
        """Deliver what the store has not got yet, and release connections."""
        await self.limiter.close()
        try:
            await self.live.store.close()
        except DependencyError as error:
            log.warning("state store not closed: %s", error)

    async def identify(self, key: str | None) -> Identity:
        """Return whose key it is; raise RequestError `unauthorized`.

        What is refused here may have been allowed elsewhere a moment ago, so the store is asked
        before a refusal.
        """
        directory = self.directory
        try:
            return directory.identify(key, now=self._clock.now())
        except RequestError:
            await self.catch_up()
            if self.directory is directory:
                raise
        return self.directory.identify(key, now=self._clock.now())

    async def identify_now(self, key: str | None) -> Identity:
        """Do the same for a request that makes no claim, which would tell of a change."""
        await self.catch_up()
        return self.directory.identify(key, now=self._clock.now())

    async def identify_for(self, identity: Identity, model: str) -> Identity:
        """Return the identity as of now, if it may not use a model as far as is known here."""
        if identity.model_of(model) is not None:
            return identity
        await self.catch_up()
        return self.directory.identify_again(identity, now=self._clock.now())

    async def refuse_early(self, identity: Identity) -> None:
        """Raise LimitReached again for whom a limit has just refused, before its prompt is read.

        Otherwise a tenant beyond its limits would still have every prompt tokenized.
        """
        refused = self._refused.get(identity.tenant.name)
        if refused is None or refused.identity != identity:
            return
        passed_s = self._clock.now() - refused.at
        if 0 <= passed_s < min(_REFUSAL_MEMORY_S, refused.reached.hit.retry_after_s):
            await self.catch_up()
            current = self.directory.identify_again(identity, now=self._clock.now())
            if current == identity:
                raise refused.reached.later(passed_s)
        del self._refused[identity.tenant.name]

    async def reserve(
        self,
        identity: Identity,
        *,
        id: str,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int | None,
    ) -> Grant:
        """Claim a request's expected tokens; `model` is the name that the client gave.

        Raises LimitReached, or what `identify` raises when the key was blocked meanwhile, or
        `model_not_found` when it lost the model.
        """
        for attempt in itertools.count():
            tokens = self._expected.tokens(identity.tenant.name, max_tokens=max_tokens)
            claim = Claim(
                id=f"{id}.{attempt}",
                scopes=identity.scopes,
                num_tokens=num_prompt_tokens + tokens,
            )
            verdict, current = await self._try(claim, identity, model)
            if current is identity or current == identity:
                break
            identity = current
        if verdict.hit is not None:
            reached = LimitReached(claim, verdict, verdict.hit)
            if reached.is_for_any_size:
                self._refused[identity.tenant.name] = _Refused(identity, reached, self._clock.now())
            raise reached
        return Grant(identity, claim, verdict)

    def settle(self, grant: Grant, usage: UsageRecord) -> None:
        """Charge what was used, and write it down: at once, with all that ends in this turn."""
        if usage.output_tokens and usage.outcome == "ok":
            self._expected.note(usage.tenant, usage.output_tokens)
        if not self._ended:
            self._spawn(self._settle_ended())
        self._ended.append(_settlement(grant.claim, usage.charged_tokens, usage))

    async def _settle_ended(self) -> None:
        ended, self._ended = self._ended, []
        await self.limiter.settle(*ended)

    async def _try(self, claim: Claim, identity: Identity, model: str) -> tuple[Verdict, Identity]:
        """Make a claim; return the verdict, and who the client is in the directory of then.

        If that is another, the claim was made by rules that no longer hold, and is withdrawn. So it
        is when the client leaves: the store may have counted it all the same.
        """
        try:
            verdict = await self.limiter.reserve(claim)
            await self.live.follow(verdict.directory)
            current = self._identify_again(identity, model)
        except BaseException:
            self._spawn(self.limiter.settle(_settlement(claim, 0, None)))
            raise
        if current is not identity and current != identity:
            await self.limiter.settle(_settlement(claim, 0, None))
        return verdict, current

    def _identify_again(self, identity: Identity, model: str) -> Identity:
        current = self.directory.identify_again(identity, now=self._clock.now())
        if current is not identity and current.model_of(model) is None:
            raise unknown_model(model)
        return current

    async def catch_up(self) -> None:
        """Follow the store, unless it is known to be away."""
        if not isinstance(self.limiter, FleetLimiter) or self.limiter.down_reason is None:
            await self.live.catch_up()


def unknown_model(name: str) -> RequestError:
    """Return the one answer to a model that does not exist, and to one that a key may not use."""
    return RequestError("model_not_found", f"the model {name!r} does not exist", param="model")


def _settlement(claim: Claim, num_tokens: int, usage: UsageRecord | None) -> Settlement:
    scopes = tuple([scope.name for scope in claim.scopes])
    return Settlement(id=claim.id, scopes=scopes, num_tokens=num_tokens, usage=usage)

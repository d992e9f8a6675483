"""The handshake: which registered replicas serve a model together, and which are refused.

A served model name pins one identity and one hash scheme. A record that differs is refused with
both values named, because its cache could never be credited rightly. Pure; it polls nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvindex.foundation.errors import HashMismatchError
from kvindex.hashing import HashScheme
from kvindex.registry import ModelIdentity, ReplicaRecord, check_record, pool_id

PIN_S = 60.0
"""How long a name stays pinned after the last replica that fitted it was seen."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that share one index; `model` is the first name they serve."""

    id: str
    model: str
    identity: ModelIdentity
    scheme: HashScheme


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was not let in, and why."""

    replica: str
    url: str
    epoch: int
    reason: str


@dataclass(slots=True)
class _Pin:
    identity: ModelIdentity
    scheme: HashScheme
    seen_at: float
    is_foreign: bool


@dataclass(slots=True)
class PoolBook:
    """Pins by served model name.

    The oldest record pins a free name, so that gateways agree without talking to each other; a
    pin outlives a restart of its replicas by `PIN_S`, so that a wrong newcomer cannot take over.
    Foreign engines pin a name only until a replica of ours comes: their bridges follow it.
    """

    _pins: dict[str, _Pin] = field(default_factory=dict)

    def admit(
        self, records: Sequence[ReplicaRecord], now: float
    ) -> tuple[list[tuple[ReplicaRecord, Pool]], list[Refusal]]:
        """Sort records into those that fit, each with its pool, and refusals."""
        admitted: list[tuple[ReplicaRecord, Pool]] = []
        refused: list[Refusal] = []
        for record in sorted(records, key=lambda record: (record.epoch, record.id)):
            try:
                self._check(record, now)
            except HashMismatchError as error:
                refusal = Refusal(
                    replica=record.id, url=record.url, epoch=record.epoch, reason=str(error)
                )
                refused.append(refusal)
                continue
            admitted.append((record, pool_of(record)))
        return admitted, refused

    def _check(self, record: ReplicaRecord, now: float) -> None:
        if not record.served_models:
            raise HashMismatchError(f"replica {record.id} serves no model")
        is_foreign = record.kind != "prefixfleet"
        check_record(record, record.identity, record.hash_scheme)
        for model in record.served_models:
            pin = self._pin(model, now)
            if pin is not None and (is_foreign or not pin.is_foreign):
                check_record(record, pin.identity, pin.scheme)
        for model in record.served_models:
            pin = self._pin(model, now)
            keeps_ours = pin is not None and not pin.is_foreign
            self._pins[model] = _Pin(
                record.identity, record.hash_scheme, now, is_foreign and not keeps_ours
            )

    def _pin(self, model: str, now: float) -> _Pin | None:
        """Return what a name is pinned to, None when it is free."""
        pin = self._pins.get(model)
        return pin if pin is not None and now - pin.seen_at <= PIN_S else None


def pool_of(record: ReplicaRecord) -> Pool:
    """Return the pool that a record belongs to, named by the first model it serves."""
    model = record.served_models[0]
    return Pool(
        id=pool_id(model, record.identity, record.hash_scheme),
        model=model,
        identity=record.identity,
        scheme=record.hash_scheme,
    )

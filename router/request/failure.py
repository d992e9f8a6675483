"""What the client is told when no replica could serve it.

What the client did wrong is said in the replica's words. A replica that refuses the gateway (401,
403) or has no such model (404) is the operator's problem, and reads as a lost replica.
"""

from __future__ import annotations

import msgspec

from engine.frontend.errors import KINDS, RequestError
from router.fleet.client import ReplicaFailure

_KIND_OF_STATUS = {
    400: "invalid_request",
    405: "method_not_allowed",
    413: "payload_too_large",
    415: "unprocessable",
    422: "unprocessable",
    429: "overloaded",
}
_DRAINING = KINDS["draining"].code


class _ErrorObject(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: _ErrorObject


def as_drained(failure: ReplicaFailure, *, replica: str, draining: bool) -> ReplicaFailure:
    """Return the failure as `drained` where the replica ended in order; `draining`: it said so.

    Its operator has told it to end, so neither the replica nor the request is to blame.
    """
    refuses = failure.cause == "status" and _said(failure).code == _DRAINING
    if refuses or (draining and failure.cause in ("connect", "lost")):
        return ReplicaFailure("drained", f"{replica} is shutting down")
    return failure


def as_request_error(failure: ReplicaFailure, *, has_begun: bool) -> RequestError:
    """Say what the last failure means for the client; `has_begun`: it has seen output."""
    if failure.cause == "timeout" and not has_begun:
        return RequestError("first_token_timeout", str(failure), retry_after_s=1.0)
    if failure.cause == "drained" and not has_begun:
        return RequestError("no_replica", f"{failure}, and no other is free", retry_after_s=1.0)
    kind = _KIND_OF_STATUS.get(failure.status or 0)
    if kind is None:
        return RequestError("replica_lost", f"no replica could finish this request: {failure}")
    said = _said(failure)
    if said.code == "context_length_exceeded":
        kind = "context_length_exceeded"
    return RequestError(
        kind,
        said.message or str(failure),
        param=said.param,
        retry_after_s=(failure.retry_after_s or 1.0) if kind == "overloaded" else None,
    )


def _said(failure: ReplicaFailure) -> _ErrorObject:
    """Read what a replica said, nothing when it was no error object."""
    try:
        return msgspec.json.decode(failure.body, type=_ErrorEnvelope).error
    except msgspec.DecodeError:
        return _ErrorObject()


def quarantined(left_s: float) -> RequestError:
    """Refuse a request that replicas have died of."""
    return RequestError(
        "replica_lost",
        "two replicas died while they served just this request, so it is not tried again for "
        f"another {left_s:.0f} s; change it, or look into the replicas' logs",
        retry_after_s=left_s,
    )

"""Errors as a client sees them: one table kind -> HTTP status, OpenAI type and code.

Replica front and gateway both answer through it. It knows no HTTP framework.
"""

from __future__ import annotations

import msgspec

from kvindex.foundation.errors import PrefixFleetError


class ErrorShape(msgspec.Struct, frozen=True):
    """How one kind of error travels."""

    status: int
    type: str
    code: str | None


KINDS: dict[str, ErrorShape] = {
    "invalid_request": ErrorShape(400, "invalid_request_error", None),
    "context_length_exceeded": ErrorShape(400, "invalid_request_error", "context_length_exceeded"),
    "unauthorized": ErrorShape(401, "authentication_error", "invalid_api_key"),
    "forbidden": ErrorShape(403, "permission_error", "forbidden"),
    "not_found": ErrorShape(404, "invalid_request_error", "not_found"),
    "model_not_found": ErrorShape(404, "invalid_request_error", "model_not_found"),
    "method_not_allowed": ErrorShape(405, "invalid_request_error", "method_not_allowed"),
    "conflict": ErrorShape(409, "invalid_request_error", "conflict"),
    "payload_too_large": ErrorShape(413, "invalid_request_error", "payload_too_large"),
    "unprocessable": ErrorShape(422, "invalid_request_error", None),
    "overloaded": ErrorShape(429, "rate_limit_error", "rate_limit_exceeded"),
    "rate_limited": ErrorShape(429, "rate_limit_error", "rate_limit_exceeded"),
    "quota_exceeded": ErrorShape(429, "insufficient_quota", "insufficient_quota"),
    "internal": ErrorShape(500, "server_error", "internal_error"),
    "replica_lost": ErrorShape(502, "server_error", "replica_lost"),
    "no_replica": ErrorShape(503, "server_error", "no_available_replica"),
    "dependency": ErrorShape(503, "server_error", "dependency_unavailable"),
    "starting": ErrorShape(503, "server_error", "starting"),
    "draining": ErrorShape(503, "server_error", "draining"),
    "sleeping": ErrorShape(503, "server_error", "sleeping"),
    "engine_dead": ErrorShape(503, "server_error", "engine_dead"),
    "first_token_timeout": ErrorShape(504, "server_error", "first_token_timeout"),
}


class RequestError(PrefixFleetError):
    """Raised when a request cannot be answered; carries what the client is told.

    `kind` is a key of `KINDS`; `param` names the offending field in dotted form.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def shape(self) -> ErrorShape:
        """Status, type and code of this error; an unknown kind is internal."""
        return KINDS.get(self.kind, KINDS["internal"])


def invalid_value(param: str, problem: str) -> RequestError:
    """Return the refusal of a field, whose name begins the message."""
    return RequestError("invalid_request", f"{param}: {problem}", param=param)


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """OpenAI's error answer."""

    error: ErrorBody


def envelope(error: PrefixFleetError) -> ErrorEnvelope:
    """Shape any error of ours for a client; internal details never leave through it."""
    shape = KINDS.get(error.kind, KINDS["internal"])
    param = error.param if isinstance(error, RequestError) else None
    known = isinstance(error, RequestError)
    message = str(error) if known else "internal error"
    return ErrorEnvelope(ErrorBody(message, shape.type, param, shape.code))

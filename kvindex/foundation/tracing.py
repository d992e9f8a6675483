"""Spans through OpenTelemetry's API where an SDK records them, and one trace id everywhere.

A trace goes from hop to hop in the header `traceparent` (W3C Trace Context). Where nothing records
spans the header of the caller is passed on as it came, so that hops before and behind us still
meet in one trace. Which SDK there is, and where it sends spans, is its own configuration; we only
name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    propagate = trace = None  # type: ignore[assignment]

TRACE_HEADERS = ("traceparent", "tracestate")
_NO_SPAN = nullcontext()
_passed_on: ContextVar[Mapping[str, str]] = ContextVar("passed_on", default={})  # noqa: B039
_is_recorded: ContextVar[bool | None] = ContextVar("is_recorded", default=None)
"""Whether spans go anywhere, found out once per request: the API looks into the environment."""

Attribute = str | int | float | bool


def _records() -> bool:
    """Tell whether spans go anywhere: making them for nobody takes a tenth of a short request."""
    known = _is_recorded.get()
    return _has_recorder() if known is None else known


def _has_recorder() -> bool:
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


@contextmanager
def server_span(name: str, headers: Mapping[str, str]) -> Iterator[None]:
    """Be a span of the trace that a request's headers name, else of a new one."""
    carrier = {key: headers[key] for key in TRACE_HEADERS if key in headers}
    is_recorded = _has_recorder()
    known, passed_on = _is_recorded.set(is_recorded), _passed_on.set(carrier)
    try:
        if not is_recorded:
            yield
            return
        tracer, kind = trace.get_tracer("prefixfleet"), trace.SpanKind.SERVER
        with tracer.start_as_current_span(name, propagate.extract(carrier), kind=kind):
            yield
    finally:
        _passed_on.reset(passed_on)
        _is_recorded.reset(known)


def span(name: str, **attributes: Attribute) -> AbstractContextManager[object]:
    """Be a part of the current span."""
    if not _records():
        return _NO_SPAN
    return trace.get_tracer("prefixfleet").start_as_current_span(name, attributes=attributes)


def annotate(**attributes: Attribute | None) -> None:
    """Say something about the current span; what is None is left out."""
    if _records():
        known: Any = {key: value for key, value in attributes.items() if value is not None}
        trace.get_current_span().set_attributes(known)


def outgoing() -> dict[str, str]:
    """Return the headers that let the next hop go on with the current trace."""
    if not _records():
        return dict(_passed_on.get())
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier

"""Spans through OpenTelemetry's API where an SDK records them, and one trace id everywhere.

A trace goes from hop to hop in the header `traceparent` (W3C Trace Context). Where nothing records
spans the header of the caller is passed on as it came, so that hops before and behind us still
meet in one trace. Which SDK there is, and where it sends spans, is its own configuration; we only
name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    propagate = trace = None  # type: ignore[assignment]

TRACE_HEADERS = ("traceparent", "tracestate")
_passed_on: ContextVar[Mapping[str, str]] = ContextVar("passed_on", default={})  # noqa: B039

Attribute = str | int | float | bool


def _records() -> bool:
    """Tell whether spans go anywhere: making them for nobody takes a tenth of a short request."""
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


@contextmanager
def server_span(name: str, headers: Mapping[str, str]) -> Iterator[None]:
    """Be a span of the trace that a request's headers name, else of a new one."""
    carrier = {key: headers[key] for key in TRACE_HEADERS if key in headers}
    if not _records():
        if not carrier:
            yield
            return
        token = _passed_on.set(carrier)
        try:
            yield
        finally:
            _passed_on.reset(token)
        return
    tracer, kind = trace.get_tracer("prefixfleet"), trace.SpanKind.SERVER
    with tracer.start_as_current_span(name, propagate.extract(carrier), kind=kind):
        yield


@contextmanager
def span(name: str, **attributes: Attribute) -> Iterator[None]:
    """Be a part of the current span."""
    if not _records():
        yield
        return
    with trace.get_tracer("prefixfleet").start_as_current_span(name, attributes=attributes):
        yield


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

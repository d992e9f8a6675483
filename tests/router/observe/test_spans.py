"""One trace id from a client through the gateway to the replica, recorded or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvindex.foundation import tracing
from tests.router.running_gateway import chat, running_gateway

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Record spans in memory, as an SDK that an operator has set up would."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


async def test_spans_of_a_request_belong_to_the_clients_trace(
    exporter: InMemorySpanExporter,
) -> None:
    async with running_gateway(replicas=1) as running:
        body = chat("hello")
        status, _, _ = await running.post("/v1/chat/completions", body, traceparent=TRACEPARENT)
        assert status == 200
        (sent,) = [h["traceparent"] for h in running.replicas[0].headers]
    spans = by_name(exporter)
    assert set(spans) == {"gateway.request", "gateway.prepare", "gateway.attempt"}
    assert {f"{s.context.trace_id:032x}" for s in spans.values() if s.context} == {TRACE_ID}
    request, attempt = spans["gateway.request"], spans["gateway.attempt"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == SPAN_ID
    assert attempt.parent is not None
    assert f"{attempt.parent.span_id:016x}" == span_id(request)
    assert sent == f"00-{TRACE_ID}-{span_id(attempt)}-01"
    assert attempt.attributes == {"replica": "r0", "attempt": 1}
    assert request.attributes is not None
    assert request.attributes["tenant"] == "acme"
    assert request.attributes["status"] == 200


async def test_without_a_recorder_the_clients_trace_goes_on() -> None:
    async with running_gateway(replicas=1) as running:
        await running.post("/v1/chat/completions", chat("a"), traceparent=TRACEPARENT)
        await running.post("/v1/chat/completions", chat("b"))
        sent = [headers.get("traceparent") for headers in running.replicas[0].headers]
    assert sent == [TRACEPARENT, None]


async def test_without_the_api_the_header_is_passed_on_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    async with running_gateway(replicas=1) as running:
        body = chat("a")
        await running.post(
            "/v1/chat/completions", body, traceparent=TRACEPARENT, tracestate="vendor=1"
        )
        await running.post("/v1/chat/completions", chat("b"))
        first, second = running.replicas[0].headers
    assert (first["traceparent"], first["tracestate"]) == (TRACEPARENT, "vendor=1")
    assert "traceparent" not in second

"""Server-sent events: written by us, read back from any chunking."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.errors import RequestError
from engine.frontend.sse import (
    DONE,
    KEEP_ALIVE,
    SseEvent,
    SseParser,
    encode_error,
    encode_event,
)
from kvindex.foundation.errors import WireError


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_what_we_write_is_what_a_reader_gets() -> None:
    events = parse(encode_event({"text": "a\nb\r"}) + KEEP_ALIVE + DONE)
    assert events == [
        SseEvent(data=b'{"text":"a\\nb\\r"}'),
        SseEvent(comment=b"keep-alive"),
        SseEvent(data=b"[DONE]"),
    ]
    assert [event.is_done for event in events] == [False, False, True]


def test_an_error_event_carries_openais_shape() -> None:
    (event,) = parse(encode_error(RequestError("engine_dead", "it is gone")))
    assert msgspec.json.decode(event.data) == {
        "error": {
            "message": "it is gone",
            "type": "server_error",
            "param": None,
            "code": "engine_dead",
        }
    }


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_of_the_standard_is_understood(end: bytes) -> None:
    lines = [b"event: delta", b"data: a", b"data:b", b"data", b"id: 7", b"unknown: x", b"", b""]
    assert parse(end.join(lines)) == [SseEvent(data=b"a\nb\n", event="delta")]


def test_a_carriage_return_and_its_line_feed_may_come_apart() -> None:
    assert parse(b"data: a\r", b"\n\r", b"\ndata: b\r\n\r\n") == [
        SseEvent(data=b"a"),
        SseEvent(data=b"b"),
    ]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: x\n\n\n\ndata: a\n\n") == [SseEvent(data=b"a")]


def test_an_unfinished_event_is_not_returned_but_known() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a") == []
    assert parser.has_partial_event
    assert parser.feed(b"\n") == []
    assert parser.has_partial_event
    assert parser.feed(b"\n") == [SseEvent(data=b"a")]
    assert not parser.has_partial_event


@pytest.mark.parametrize(
    "endless", [b"data: " + b"x" * 200, b"data: x\n" * 40, b"data:\n" * 40, b":" + b"x" * 200]
)
def test_an_event_beyond_the_bound_is_refused(endless: bytes) -> None:
    parser = SseParser(max_event_bytes=100)
    quarter = len(endless) // 4
    assert parser.feed(endless[:quarter]) == []
    with pytest.raises(WireError, match="an event exceeds 100 bytes"):
        parser.feed(endless[quarter:])


def test_any_number_of_small_events_is_within_the_bound() -> None:
    parser = SseParser(max_event_bytes=20)
    assert len(parser.feed(b"data: x\n\n: c\n" * 1000)) == 2000


@given(st.binary(max_size=200), st.lists(st.integers(1, 20)), st.sampled_from([b"\n", b"\r\n"]))
@settings(max_examples=100, deadline=None)
def test_chunking_changes_nothing(noise: bytes, cuts: list[int], end: bytes) -> None:
    stream = noise + end.join([b"", b"data: a", b"", b": c", b"data: b", b"", b""])
    chunks, start = [], 0
    for size in [*cuts, len(stream)]:
        chunks.append(stream[start : start + size])
        start += size
    assert parse(*chunks) == parse(stream)

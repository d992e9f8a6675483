"""Each format: how it is recognised, and what its rows become."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.frontend.prompt import PromptEncoder
from kvindex.foundation.clock import SystemClock
from sim.traces.errors import TraceError
from sim.traces.registry import FORMATS
from sim.traces.row import TraceRow
from sim.traces.trace import Trace, open_trace
from tests.engine.frontend.tiny_tokenizer import tiny_bundle
from tests.sim.traces.samples import (
    AZURE,
    CLAUDE_CODE,
    CONVERSATION,
    MAGAGENT,
    header,
    row,
    sample,
    write_lines,
)


def read(path: Path, *lines: object, block_size: int | None = None) -> tuple[Trace, list[TraceRow]]:
    trace = open_trace(write_lines(path, *lines), block_size=block_size)
    return trace, list(trace.rows())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_mooncake_rows_are_in_seconds_with_the_block_size_that_fits() -> None:
    trace = sample(CONVERSATION)
    rows = list(trace.rows())
    assert (trace.format_name, len(rows)) == ("mooncake", 12031)
    assert (trace.header.block_size, trace.header.tail) == (512, "ceil")
    assert rows[0] == TraceRow(
        line=1,
        arrival_s=0.0,
        input_length=6758,
        output_length=500,
        hash_ids=tuple(range(14)),
    )
    assert rows[-1].arrival_s == 3536.999
    assert [row.arrival_s for row in rows] == [row.arrival_s for row in trace.rows()]


def test_a_mooncake_superset_keeps_its_sessions() -> None:
    trace = sample(CLAUDE_CODE)
    first = next(trace.rows())
    assert (trace.header.block_size, trace.header.tail) == (64, "floor")
    assert (first.session_id, first.model) == ("trace_0260", "claude-opus-4-5-20251101")
    assert sum(row.hash_ids == () for row in sample(MAGAGENT).rows()) == 53


def test_the_canonical_form_has_every_field(file: Path) -> None:
    fields = {
        "request_id": "r1",
        "session_id": "s1",
        "parent_id": "r0",
        "tenant": "team-a",
        "model": "m",
        "priority": 2,
        "output_hash_ids": [9],
        "group": "g",
        "client_salt": "salt-1",
        "outcome": "refused",
    }
    trace, rows = read(file, header(), row(2500, [1, 2], delay_ms=1500, **fields))
    assert (trace.format_name, trace.notes) == ("kvtrace", ())
    assert rows == [
        TraceRow(
            line=2,
            arrival_s=2.5,
            input_length=8,
            output_length=1,
            hash_ids=(1, 2),
            request_id="r1",
            session_id="s1",
            parent_id="r0",
            delay_s=1.5,
            tenant="team-a",
            model="m",
            priority=2,
            output_hash_ids=(9,),
            group="g",
            client_salt="salt-1",
            outcome="refused",
        )
    ]


def test_local_ids_become_global_ones(file: Path) -> None:
    _, rows = read(
        file,
        header(hash_scope="local", time_unit="s"),
        row(0, [1, 2], session_id="a", output_hash_ids=[3]),
        row(1, [1, 2], session_id="b"),
        row(2, [1, 2, 3], session_id="a"),
    )
    assert [row.hash_ids for row in rows] == [(0, 1), (3, 4), (0, 1, 2)]
    assert [row.arrival_s for row in rows] == [0.0, 1.0, 2.0]
    assert rows[0].output_hash_ids == (2,)


def test_local_ids_need_a_session(file: Path) -> None:
    trace = open_trace(write_lines(file, header(hash_scope="local"), row(0, [1])))
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: .*needs a session_id"):
        list(trace.rows())


def bailian(chat_id: int, parent: int, at_s: float, ids: list[int]) -> dict[str, object]:
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": at_s,
        "input_length": 16 * len(ids) - 3,
        "output_length": 7,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def test_bailian_turns_belong_to_the_session_of_their_first_turn(file: Path) -> None:
    trace, rows = read(
        file,
        bailian(10, -1, 1.5, [5, 6]),
        bailian(11, 10, 2.0, [5, 6, 7]),
        bailian(12, 11, 3.0, [8, 6]),
        bailian(20, 3, 4.0, [5]),
    )
    assert (trace.format_name, trace.header.block_size) == ("bailian", 16)
    assert [row.session_id for row in rows] == ["10", "10", "10", "3"]
    assert [row.parent_id for row in rows] == [None, "10", "11", "3"]
    # Block 6 after another block is another prefix.
    assert [row.hash_ids for row in rows] == [(0, 1), (0, 1, 2), (3, 4), (0,)]


def weka_call(t: float, ids: list[int], **fields: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 64 * len(ids) + 5, "out": 3, "hash_ids": ids, **fields}


def weka(name: str, *requests: object, scope: str = "local") -> dict[str, object]:
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}


def test_claude_code_conversations_are_merged_and_their_ids_kept_apart(file: Path) -> None:
    subagent = {
        "t": 4.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [weka_call(0.0, [1, 9]), weka_call(2.0, [1, 9, 10])],
    }
    trace, rows = read(
        file,
        weka("a", weka_call(0.0, [1, 2]), subagent, weka_call(9.0, [1, 2, 3], think_time=1.5)),
        weka("b", weka_call(5.0, [1, 2])),
    )
    assert (trace.format_name, trace.header.tail) == ("weka", "floor")
    assert "each begins at 0 s; --session-gap S spreads them" in trace.notes[-1]
    assert [(row.session_id, row.arrival_s) for row in rows] == [
        ("a", 0.0),
        ("a/x", 4.0),
        ("b", 5.0),
        ("a/x", 6.0),
        ("a", 9.0),
    ]
    assert [row.hash_ids for row in rows] == [(0, 1), (0, 2), (3, 4), (0, 2, 5), (0, 1, 6)]
    assert (rows[4].parent_id, rows[4].delay_s) == ("a#0", 1.5)


def test_conversations_can_be_spread_over_time(file: Path) -> None:
    subagent = {"t": 4.0, "type": "subagent", "requests": [weka_call(0.0, [1])]}
    lines = [weka(f"c{number}", weka_call(0.0, [1]), subagent) for number in range(200)]
    trace = open_trace(write_lines(file, *lines), session_gap_s=10.0)
    arrivals_s = {row.session_id: row.arrival_s for row in trace.rows()}
    assert arrivals_s["c0"] == 0.0
    assert 1500 < arrivals_s["c199"] < 2500
    assert all(arrivals_s[f"c{n}/1"] == arrivals_s[f"c{n}"] + 4.0 for n in range(200))
    assert arrivals_s == {row.session_id: row.arrival_s for row in trace.rows()}
    assert trace.notes[-1].startswith("conversations begin at invented times, 10 s apart")


def test_a_subagent_may_share_the_clock_of_its_conversation(file: Path) -> None:
    subagent = {"t": 4.0, "type": "subagent", "requests": [weka_call(4.5, [1])]}
    _, rows = read(file, weka("a", weka_call(0.0, [1]), subagent))
    assert [(row.session_id, row.arrival_s) for row in rows] == [("a", 0.0), ("a/1", 4.5)]


def test_conversations_of_one_file_must_agree(file: Path) -> None:
    lines = [weka("a", weka_call(0.0, [1])), weka("b", weka_call(0.0, [1]), scope="global")]
    trace = open_trace(write_lines(file, *lines))
    with pytest.raises(TraceError, match=r":2: hash_id_scope is global, in the first .* local"):
        list(trace.rows())


def lookup(at_s: float | None, *chunks: str, model: str = "m") -> dict[str, object]:
    times = {} if at_s is None else {"timestamp": at_s}
    return {
        "seq_len": 256 * len(chunks) + 9,
        "chunk_hashes": list(chunks),
        "model_name": model,
        "dtypes": ["bf16"],
        "shapes": [[1]],
        **times,
    }


def test_lmcache_lookups_of_two_models_share_no_chunk(file: Path) -> None:
    first = {**lookup(1000.5, "0xa", "0xb"), "chunk_size": 256}
    trace, rows = read(file, first, lookup(1002.0, "0xa", "0xc"), lookup(1003.0, "0xa", model="n"))
    assert (trace.format_name, trace.header.block_size) == ("lmcache", 256)
    assert [row.hash_ids for row in rows] == [(0, 1), (0, 2), (3,)]
    assert [row.arrival_s for row in rows] == [0.0, 1.5, 2.5]
    assert trace.notes[-1] == "no output lengths: they are 0"


def test_an_old_lmcache_log_needs_its_chunk_size_and_has_no_clock(file: Path) -> None:
    write_lines(file, lookup(None, "0xa"), lookup(None, "0xa", "0xb"))
    with pytest.raises(TraceError, match="block size unknown: the log has no chunk_size"):
        open_trace(file)
    trace = open_trace(file, block_size=256)
    assert [row.arrival_s for row in trace.rows()] == [0.0, 0.0]
    assert "only the order means something" in trace.notes[-1]


def test_token_ids_become_blocks_of_the_stated_size(file: Path) -> None:
    lines = (
        {"timestamp": 0, "token_ids": [1, 2, 3, 4, 5], "output_token_ids": [6, 7, 8]},
        {"timestamp": 10, "prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "output_length": 2},
    )
    trace, rows = read(file, *lines, block_size=4)
    assert (trace.format_name, trace.header.tail) == ("tokens", "floor")
    assert [row.hash_ids for row in rows] == [(0,), (0, 1)]
    assert [row.output_hash_ids for row in rows] == [(1,), None]
    assert [row.output_length for row in rows] == [3, 2]
    with pytest.raises(TraceError, match="block size unknown: token ids may be cut"):
        open_trace(file)


def test_sub_requests_follow_one_another_after_their_tool_calls(file: Path) -> None:
    turns = [
        {"input_tok_ids": [1, 2], "output_toks": 1, "tool_duration_ns": 2_000_000_000},
        {"input_tok_ids": [1, 2, 3, 4], "output_toks": 5},
    ]
    _, rows = read(
        file,
        {"session_id": "s", "arrival_time_ns": 1_000_000_000, "sub_requests": turns},
        {"arrival_time_ns": 2_000_000_000, "input_tok_ids": [1, 2], "output_toks": 1},
        block_size=2,
    )
    assert [(row.arrival_s, row.session_id, row.delay_s) for row in rows] == [
        (1.0, "s", None),
        (2.0, None, None),
        (3.0, "s", 2.0),
    ]
    assert (rows[2].request_id, rows[2].parent_id) == ("s#1", "s#0")
    assert [row.hash_ids for row in rows] == [(0,), (0,), (0, 1)]


def test_a_log_of_request_bodies_is_tokenized_as_the_gateway_does(file: Path) -> None:
    prompts = PromptEncoder(tiny_bundle(), clock=SystemClock(), max_model_len=4096)
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
    text = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 9, "temperature": 0.5}
    usage = {"completion_tokens": 4}
    write_lines(
        file,
        {"timestamp": 50.0, "body": chat, "usage": usage, "tenant": "team-a"},
        {"timestamp": 51.0, "body": text, "session_id": "s"},
        {"timestamp": 52.0, "body": chat},
    )
    rows = list(open_trace(file, block_size=4, prompts=prompts).rows())
    assert [row.arrival_s for row in rows] == [0.0, 1.0, 2.0]
    assert [row.output_length for row in rows] == [4, 9, 0]
    assert (rows[0].tenant, rows[1].session_id) == ("team-a", "s")
    assert (rows[1].input_length, len(rows[1].hash_ids or ())) == (5, 1)
    assert rows[0].hash_ids == rows[2].hash_ids
    assert rows[0].input_length // 4 == len(rows[0].hash_ids or ())


def test_a_log_of_request_bodies_needs_a_tokenizer_and_prompts(file: Path) -> None:
    write_lines(file, {"body": {"model": "m", "input": "x"}})
    with pytest.raises(TraceError, match="pass a model's tokenizer, --tokenizer FOLDER"):
        open_trace(file, block_size=4)
    prompts = PromptEncoder(tiny_bundle(), clock=SystemClock(), max_model_len=4096)
    with pytest.raises(TraceError, match=r":1: the body has neither messages nor prompt"):
        list(open_trace(file, block_size=4, prompts=prompts).rows())
    write_lines(file, {"body": {"model": "m", "messages": [], "tools": [{"type": "function"}]}})
    with pytest.raises(TraceError, match=r":1: tools are part of a prompt that we cannot render"):
        list(open_trace(file, block_size=4, prompts=prompts).rows())


def test_azure_has_arrivals_and_lengths_and_no_word_about_hits() -> None:
    trace = sample(AZURE)
    rows = list(trace.rows())
    assert (trace.format_name, trace.header.block_size) == ("azure", None)
    assert trace.notes[-1] == "lengths only: hits unknown"
    assert rows[0] == TraceRow(line=2, arrival_s=0.0, input_length=374, output_length=44)
    assert rows[1].arrival_s == 4.314579
    assert len(rows) == 2000


def test_a_csv_may_end_its_lines_with_crlf_and_name_a_zone(file: Path) -> None:
    file.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2024-05-10 00:00:00.009930+00:00,10,1\r\n"
        b"2024-05-10 00:00:01.009930+00:00,20,2"
    )
    assert [row.arrival_s for row in open_trace(file).rows()] == [0.0, 1.0]


def test_burstgpt_keeps_models_and_sessions(file: Path) -> None:
    trace, rows = read(
        file,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type",
        "5.0,7,1.5,ChatGPT,472,18,Conversation log",
        "45.5,,2.5,GPT-4,1087,230,API log",
    )
    assert trace.format_name == "burstgpt"
    assert [(row.arrival_s, row.model, row.session_id) for row in rows] == [
        (0.0, "ChatGPT", "7"),
        (40.5, "GPT-4", None),
    ]


@pytest.mark.parametrize("cells", ["5.0,ChatGPT,x,18", "5.0,ChatGPT,1"])
def test_a_csv_row_that_cannot_be_read_is_named(file: Path, cells: str) -> None:
    trace = open_trace(write_lines(file, "Timestamp,Model,Request tokens,Response tokens", cells))
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: "):
        list(trace.rows())


def test_an_unknown_format_lists_the_known_ones(file: Path) -> None:
    write_lines(file, {"hello": 1})
    with pytest.raises(TraceError, match=r":1: no known format .*kvtrace, bailian, tokens"):
        open_trace(file)
    with pytest.raises(TraceError, match="unknown format 'moncake'; did you mean 'mooncake'"):
        open_trace(file, format="moncake")
    assert all(format.name == name for name, format in FORMATS.items())

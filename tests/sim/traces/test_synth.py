"""Drawn traces are valid, repeatable, and hit as their source does."""

from __future__ import annotations

import msgspec
import pytest

from sim.oracle.bounds import infinite_cache
from sim.oracle.reuse import reuse_of
from sim.traces.errors import TraceError
from sim.traces.row import TraceRow
from sim.traces.source import TraceSource
from sim.traces.synth import Synthesizer, SynthPlan
from sim.traces.validation import RowValidator
from tests.sim.traces.samples import AZURE, CONVERSATION_1000, MAGAGENT, SYNTHETIC_1000, sample


def drawn(plan: SynthPlan) -> list[TraceRow]:
    """Draw from 1,000 rows and check each row as a file's would be."""
    source = Synthesizer(sample(CONVERSATION_1000), plan)
    validator = RowValidator(TraceSource(CONVERSATION_1000), source.header)
    return list(validator.check(source.rows()))


def token_hit(rows: list[TraceRow]) -> float:
    rate = infinite_cache(reuse_of(rows, block_size=512)).token_hit
    assert rate is not None
    return rate


PLAIN = SynthPlan(seed=7)


def test_equal_seeds_draw_equal_traces_and_others_do_not() -> None:
    assert drawn(PLAIN) == drawn(PLAIN)
    assert drawn(PLAIN) != drawn(SynthPlan(seed=8))


def test_a_drawn_trace_is_as_long_and_hits_about_as_much() -> None:
    rows, source = drawn(PLAIN), list(sample(CONVERSATION_1000).rows())
    assert len(rows) == 1000
    assert rows[-1].arrival_s <= source[-1].arrival_s
    assert abs(token_hit(rows) - token_hit(source)) < 0.05
    lengths = [sum(row.input_length for row in trace) for trace in (rows, source)]
    assert abs(lengths[0] / lengths[1] - 1) < 0.1


def test_more_requests_come_in_the_same_time() -> None:
    rows = drawn(SynthPlan(num_requests=2500))
    assert len(rows) == 2500
    assert rows[-1].arrival_s <= 330.0


def test_copies_of_the_tree_share_nothing() -> None:
    rows = drawn(SynthPlan(root_multiplier=5))
    assert len({row.hash_ids[0] for row in rows if row.hash_ids}) == 5
    assert token_hit(rows) < token_hit(drawn(PLAIN))


def test_longer_prefixes_hit_more_and_longer_prompts_less() -> None:
    plain = token_hit(drawn(PLAIN))
    assert token_hit(drawn(SynthPlan(seed=7, prefix_multiplier=2.5))) > plain
    assert token_hit(drawn(SynthPlan(seed=7, prompt_multiplier=2.5))) < plain
    assert token_hit(drawn(SynthPlan(seed=7, prefix_multiplier=0.5))) < plain


def test_approximate_lengths_become_exact() -> None:
    source = Synthesizer(sample(MAGAGENT), PLAIN)
    assert source.header.lengths == "exact"
    validator = RowValidator(TraceSource(MAGAGENT), source.header)
    assert len(list(validator.check(source.rows()))) == 746


def test_the_header_says_that_it_is_synthetic() -> None:
    header = Synthesizer(sample(SYNTHETIC_1000), PLAIN).header
    assert header.source == "synthetic, after synthetic_first1000.jsonl.gz"
    assert msgspec.structs.replace(header, source="") == sample(SYNTHETIC_1000).header


def test_without_prefixes_there_is_nothing_to_draw() -> None:
    with pytest.raises(TraceError, match="cannot resample prefixes: the trace has no hash_ids"):
        Synthesizer(sample(AZURE), PLAIN)

"""Grammars in the engine: masks, drafts, thinking, and requests that fail alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.frontend.sampling_params import GrammarSpec, ThinkingSpan
from engine.grammar import GrammarError, OutputGrammar, allowed_token_ids
from engine.messages import EngineRequest
from engine.scripted_executor import ScriptedExecutor
from engine.scripted_grammar import ChoiceBackend
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import BLOCK_SIZE, Run, make_request, run

END, THINK, ANSWER = 0, 1, 2


def choice(*texts: str, thinking: ThinkingSpan | None = None) -> GrammarSpec:
    text = msgspec.json.encode(texts).decode()
    return GrammarSpec("choice", text, thinking=thinking)


def output_of(*texts: str, thinking: ThinkingSpan | None = None) -> OutputGrammar:
    matcher = ChoiceBackend().compile(choice(*texts)).matcher()
    return OutputGrammar(matcher, vocab_size=256, end_token_ids=[END], thinking=thinking)


def allowed(grammar: OutputGrammar) -> bytes:
    """What may come next, as a text of one-byte tokens."""
    return bytes(allowed_token_ids(grammar.mask()))


def core_with(backend: ChoiceBackend | None, **settings: object) -> EngineCore:
    plain = {"block_size": BLOCK_SIZE, "max_step_s": 0.0, "check_integrity": True}
    config = msgspec.convert({**plain, **settings}, EngineConfig)
    executor = ScriptedExecutor(num_blocks=32, block_size=BLOCK_SIZE, grammars=backend)
    return EngineCore(config, executor, VirtualClock())


def asking(request_id: str, spec: GrammarSpec, **fields: Any) -> EngineRequest:
    return make_request(
        request_id, range(10, 20), max_tokens=20, eos=(END,), grammar=spec, **fields
    )


def said(result: Run, request_id: str) -> bytes:
    return bytes(result.tokens[request_id])


def test_only_what_goes_on_with_the_grammar_is_allowed() -> None:
    grammar = output_of("yes", "yet", "no")
    assert allowed(grammar) == b"ny"
    grammar.accept(b"ye")
    assert allowed(grammar) == b"st"


def test_a_text_that_is_whole_may_end_and_one_that_cannot_go_on_must() -> None:
    grammar = output_of("ab", "abc")
    grammar.accept(b"ab")
    assert allowed(grammar) == bytes([END]) + b"c"
    grammar.accept(b"c")
    assert allowed(grammar) == bytes([END])
    grammar.accept([END])
    assert allowed(grammar) == bytes([END])


def test_an_end_token_before_the_text_is_whole_is_refused() -> None:
    grammar = output_of("ab")
    with pytest.raises(GrammarError, match="end token 0 came before the text was complete"):
        grammar.accept([END])


def test_a_grammar_that_no_token_goes_on_with_is_an_error_and_no_empty_mask() -> None:
    with pytest.raises(GrammarError, match="no token of this model"):
        output_of().mask()


def test_drafts_are_valid_up_to_the_first_that_does_not_fit_and_change_nothing() -> None:
    grammar = output_of("yes", "no")
    assert grammar.valid_prefix(b"yexx") == 2
    assert grammar.valid_prefix([*b"no", END, END]) == 4
    assert grammar.valid_prefix([*b"no", END, *b"n"]) == 3
    assert allowed(grammar) == b"ny"


def test_what_is_thought_is_free_but_owes_an_answer() -> None:
    grammar = output_of("yes", thinking=ThinkingSpan(ANSWER))
    assert allowed(grammar) == bytes(t for t in range(256) if t != END)
    grammar.accept([9, 9, ANSWER])
    assert allowed(grammar) == b"y"


def test_an_output_may_open_its_thinking_or_answer_at_once() -> None:
    span = ThinkingSpan(ANSWER, begin_token_id=THINK)
    assert allowed(output_of("yes", thinking=span)) == bytes([THINK]) + b"y"
    at_once = output_of("yes", thinking=span)
    at_once.accept(b"y")
    assert allowed(at_once) == b"e"
    thinking = output_of("yes", thinking=span)
    thinking.accept([THINK, *b"no"])
    assert b"x" in allowed(thinking)


@pytest.mark.fault("engine-34")
def test_drafts_that_cross_the_end_of_thinking_are_held_to_the_grammar_behind_it() -> None:
    grammar = output_of("yes", thinking=ThinkingSpan(ANSWER))
    drafts = [*b"hm", ANSWER, *b"yex"]
    assert grammar.valid_prefix(drafts) == 5
    # Nothing was accepted: the border is still ahead, and may come at another place.
    grammar.accept([*b"h", ANSWER, *b"y"])
    assert allowed(grammar) == b"e"
    assert grammar.valid_prefix([*b"es", END]) == 3


def test_every_output_of_an_engine_is_one_of_the_texts() -> None:
    core = core_with(ChoiceBackend())
    requests = [
        asking(f"r{i}", choice("sunny", "rainy", "sun"), temperature=1.0, seed=i) for i in range(40)
    ]
    result = run(core, *requests)
    texts = {bytes(tokens).rstrip(b"\0") for tokens in result.tokens.values()}
    assert texts == {b"sunny", b"rainy", b"sun"}
    assert set(result.finish.values()) == {"stop"}


def test_min_tokens_make_a_text_go_on_if_it_can_and_else_repeat_its_end_token() -> None:
    core = core_with(ChoiceBackend())
    result = run(
        core,
        *(asking(f"r{i}", choice("a", "aaaa"), min_tokens=3, seed=i) for i in range(8)),
        asking("short", choice("b"), min_tokens=3),
    )
    assert {said(result, f"r{i}") for i in range(8)} == {b"aaaa\0"}
    assert said(result, "short") == b"b\0\0\0"


@pytest.mark.fault("engine-33")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_that_fails_ends_its_own_request_alone(depth: int) -> None:
    core = core_with(ChoiceBackend(), async_depth=depth)
    result = run(
        core,
        asking("good", choice("yes")),
        asking("malformed", GrammarSpec("choice", "[")),
        asking("unknown", GrammarSpec("regex", "a")),
        asking("dead end", choice()),
        make_request("free", range(10, 20), max_tokens=6),
    )
    assert said(result, "good") == b"yes\0"
    assert len(result.tokens["free"]) == 6
    failed = {name: reason for name, reason in result.finish.items() if reason == "error"}
    assert set(failed) == {"malformed", "unknown", "dead end"}
    assert core.kv_cache.pool.num_free == 31


def test_an_engine_without_grammars_says_so_to_the_request() -> None:
    core = core_with(None)
    core.add(asking("r", choice("yes")))
    outputs = [output for _ in range(3) for output in core.step()]
    assert outputs[-1].error == "grammar: this engine serves no grammars"


@pytest.mark.parametrize("depth", [0, 2])
def test_a_preempted_request_goes_on_in_its_grammar(depth: int) -> None:
    texts = [f"{i}{'x' * 30}{i}" for i in range(8)]

    def outputs(core: EngineCore) -> dict[str, list[int]]:
        requests = [
            make_request(f"r{i}", range(i, i + 8), max_tokens=40, eos=(END,), grammar=choice(text))
            for i, text in enumerate(texts)
        ]
        return run(core, *requests).tokens

    core = core_with(ChoiceBackend(), async_depth=depth, watermark=0.0)
    found = outputs(core)
    assert core.stats().preemptions_total > 0
    assert [bytes(found[f"r{i}"]).decode().rstrip("\0") for i in range(8)] == texts


def test_a_request_that_was_begun_elsewhere_goes_on_where_it_stood() -> None:
    core = core_with(ChoiceBackend())
    request = asking("r", choice("yes", "no"), resume=list(b"ye"))
    assert said(run(core, request), "r") == b"s\0"


def test_resumed_tokens_that_do_not_fit_the_grammar_end_the_request() -> None:
    core = core_with(ChoiceBackend())
    assert run(core, asking("r", choice("yes"), resume=list(b"no"))).finish == {"r": "error"}

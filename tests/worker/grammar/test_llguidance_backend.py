"""The llguidance back end: every kind of grammar, what it refuses, and what it keeps."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from engine.frontend.encoder import Encoder
from engine.frontend.sampling_params import GrammarKind, GrammarSpec, ThinkingSpan
from engine.frontend.tool_choice import FunctionTool, ToolUse
from engine.frontend.tool_families import TOOL_FAMILIES
from engine.grammar import GrammarError, OutputGrammar, allowed_token_ids
from tests.engine.frontend.tiny_tokenizer import IM_END_ID, MERGED, VOCAB_SIZE, tiny_bundle
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend

ENCODER = Encoder(tiny_bundle())
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def make_backend(**settings: int) -> LlguidanceBackend:
    bundle = tiny_bundle()
    return LlguidanceBackend(
        lambda: GrammarTokenizer.of(bundle, ENCODER), vocab_size=VOCAB_SIZE + 5, **settings
    )


@pytest.fixture(scope="module")
def backend() -> Iterator[LlguidanceBackend]:
    backend = make_backend()
    yield backend
    backend.close()


def output_of(backend: LlguidanceBackend, spec: GrammarSpec) -> OutputGrammar:
    return OutputGrammar(
        backend.compile(spec).matcher(),
        vocab_size=VOCAB_SIZE + 5,
        end_token_ids=[IM_END_ID],
        thinking=spec.thinking,
    )


def sample(backend: LlguidanceBackend, spec: GrammarSpec, seed: int) -> str:
    """Say anything that the grammar allows; texts that could go on end half of the time."""
    grammar, said, rng = output_of(backend, spec), list[int](), random.Random(seed)
    for _ in range(2000):
        allowed = allowed_token_ids(grammar.mask())
        ends = IM_END_ID in allowed and rng.random() < 0.5
        token_id = IM_END_ID if ends else rng.choice(allowed)
        grammar.accept([token_id])
        if token_id == IM_END_ID:
            return ENCODER.decode(said, skip_special_tokens=False)
        said.append(token_id)
    raise AssertionError("the text does not end")


def texts(backend: LlguidanceBackend, kind: GrammarKind, text: str, count: int = 20) -> set[str]:
    return {sample(backend, GrammarSpec(kind, text), seed) for seed in range(count)}


def test_a_choice_is_one_of_its_texts_whatever_characters_they_have(
    backend: LlguidanceBackend,
) -> None:
    choices = ["yes", 'no "quotes"\n', "né/\\x", "yes and"]
    assert texts(backend, "choice", json.dumps(choices), 60) == set(choices)


def test_a_regular_expression_is_matched_from_end_to_end(backend: LlguidanceBackend) -> None:
    found = texts(backend, "regex", r"[a-c]{2,4}(!|\?)")
    assert len(found) > 5
    assert all(re.fullmatch(r"[a-c]{2,4}(!|\?)", text) for text in found)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a" tail\ntail ::= "b" | "c" tail', 'start: "a" tail\ntail: "b" | "c" tail'],
    ids=["EBNF", "Lark"],
)
def test_a_grammar_may_be_ebnf_or_lark(backend: LlguidanceBackend, grammar: str) -> None:
    assert all(re.fullmatch("ac*b", text) for text in texts(backend, "grammar", grammar))


def test_a_json_object_is_any_object(backend: LlguidanceBackend) -> None:
    assert all(isinstance(json.loads(t), dict) for t in texts(backend, "json_object", "", 5))


def test_white_space_is_bounded_and_can_be_ruled_out(backend: LlguidanceBackend) -> None:
    schema = json.dumps(CITY)
    loose = texts(backend, "json_schema", schema, 40)
    assert len(loose) > 10
    assert all(json.loads(text)["city"] in ("Rome", "Oslo") for text in loose)
    tight = GrammarSpec("json_schema", schema, whitespace="")
    found = {sample(backend, tight, seed) for seed in range(10)}
    assert found == {'{"city":"Rome"}', '{"city":"Oslo"}'}
    spaced = GrammarSpec("json_schema", schema, whitespace="[*]")
    assert any("*" in sample(backend, spaced, seed) for seed in range(10))


def test_a_structural_tag_rules_what_stands_behind_its_trigger(
    backend: LlguidanceBackend,
) -> None:
    structure = {"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}
    tag = json.dumps({"structures": [structure], "triggers": ["<f"]})
    grammar = output_of(backend, GrammarSpec("structural_tag", tag))
    free = ENCODER.encode("anything < at all", add_special_tokens=False)
    ruled = ENCODER.encode("<f>1</f>", add_special_tokens=False)
    assert grammar.valid_prefix([*free, *ruled, IM_END_ID]) == len(free) + len(ruled) + 1
    broken = ENCODER.encode("<f>2", add_special_tokens=False)
    assert grammar.valid_prefix([*free, *broken]) == len(free) + len(broken) - 1


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_demanded_calls_are_what_their_familys_parser_reads(
    backend: LlguidanceBackend, name: str
) -> None:
    family = TOOL_FAMILIES[name]
    functions = [FunctionTool(name=name, parameters=CITY) for name in ("weather", "time")]
    use = ToolUse(functions=functions, must_call=True)
    grammar = family.grammar(use, token_id=ENCODER.token_id)
    spec = GrammarSpec("tool_calls", msgspec.json.encode(grammar).decode())
    num_calls = []
    for seed in range(20):
        parser = family.parser(["weather", "time"])
        events = [*parser.push(sample(backend, spec, seed)), *parser.finish()]
        assert not [event for event in events if isinstance(event, str)]
        starts = [e.name for e in events if hasattr(e, "name")]
        assert set(starts) <= {"weather", "time"}
        num_calls.append(len(starts))
    assert min(num_calls) == 1
    assert max(num_calls) > 1


def test_an_answer_in_json_may_stand_in_the_place_of_a_call(backend: LlguidanceBackend) -> None:
    use = ToolUse(functions=[FunctionTool(name="f", parameters=CITY)], parallel=False)
    grammar = TOOL_FAMILIES["hermes"].grammar(
        use, token_id=ENCODER.token_id, otherwise={"const": "no"}
    )
    spec = GrammarSpec("tool_calls", msgspec.json.encode(grammar).decode())
    found = {sample(backend, spec, seed)[:4] for seed in range(20)}
    assert found == {'"no"', "<too"}


@pytest.mark.fault("engine-33")
@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"type": "objct"}', "Invalid type: objct"),
        ("json_schema", '{"uniqueItems": true}', "Unimplemented keys"),
        (
            "json_schema",
            '{"type": "string", "minLength": 3, "maxLength": 1}',
            "Unsatisfiable schema",
        ),
        ("json_schema", '{"$ref": "http://host/x"}', "does not fetch resources"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[1]", "must be a JSON dict, not list"),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("regex", r"[^\s\S]", "no text of this model's tokens"),
        ("json_schema", '{"not": ' * 200 + "true" + "}" * 200, "recursion limit"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "at least one text"),
        ("choice", "[1]", "at least one text"),
        ("grammar", 'root ::= "a" b', "not valid EBNF"),
        ("grammar", 'start: "a', "lexer error"),
        ("structural_tag", "{}", "missing required field"),
        ("structural_tag", '{"structures": [], "triggers": []}', "structures is empty"),
        ("regex", "a" * (1 << 20) + "a", "at most 1048576"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_words(
    backend: LlguidanceBackend, kind: GrammarKind, text: str, problem: str
) -> None:
    with pytest.raises(GrammarError, match=problem):
        backend.compile(GrammarSpec(kind, text))
    # Others go on, and so does one that is right.
    assert texts(backend, "choice", '["fine"]', 1) == {"fine"}


def test_end_tokens_are_allowed_only_where_a_text_is_whole(backend: LlguidanceBackend) -> None:
    grammar = output_of(backend, GrammarSpec("regex", "ab?"))
    ends = []
    for token_id in [*b"ab", IM_END_ID]:
        ends.append(IM_END_ID in allowed_token_ids(grammar.mask()))
        grammar.accept([token_id])
    assert ends == [False, True, True]


def test_free_text_begins_with_no_special_token_no_unknown_one_and_no_half_character(
    backend: LlguidanceBackend,
) -> None:
    allowed = allowed_token_ids(output_of(backend, GrammarSpec("regex", "(.|\n)*")).mask())
    merged = range(256, 256 + len(MERGED))
    assert allowed == [*range(128), *range(0xC2, 0xF5), *merged, IM_END_ID]


def test_thinking_is_free_and_the_grammar_begins_behind_it(backend: LlguidanceBackend) -> None:
    border = ord("|")
    spec = GrammarSpec("choice", '["yes"]', thinking=ThinkingSpan(border))
    grammar = output_of(backend, spec)
    thought = [*b"well {[", border, *b"yes", IM_END_ID]
    assert grammar.valid_prefix(thought) == len(thought)
    assert grammar.valid_prefix([*b"well", border, *b"no"]) == 5


def test_drafts_are_tried_and_rolled_back(backend: LlguidanceBackend) -> None:
    grammar = output_of(backend, GrammarSpec("json_schema", json.dumps(CITY), whitespace=""))
    assert grammar.valid_prefix(list(b'{"city":"Rxme"}')) == 10
    assert grammar.valid_prefix([*b'{"city":"Rome"}', IM_END_ID]) == 16
    grammar.accept(list(b'{"city":"R'))
    assert allowed_token_ids(grammar.mask()) == [ord("o")]
    assert grammar.valid_prefix([*b'ome"}', IM_END_ID, *b"x"]) == 6
    grammar.accept([*b'ome"}', IM_END_ID])
    assert allowed_token_ids(grammar.mask()) == [IM_END_ID]


def compiled_specs(backend: LlguidanceBackend, choices: Sequence[str]) -> list[object]:
    return [backend.compile(GrammarSpec("choice", json.dumps([text]))) for text in choices]


def test_grammars_are_compiled_once_and_the_oldest_is_given_up() -> None:
    backend = make_backend(max_cached=2)
    a, again, b = compiled_specs(backend, ["a", "a", "b"])
    assert a is again
    assert a is not b
    third, kept, begun_anew = compiled_specs(backend, ["c", "b", "a"])
    assert kept is b
    assert begun_anew is not a
    assert third is not b
    backend.close()


def test_a_refused_grammar_is_remembered_as_refused() -> None:
    backend = make_backend()
    for _ in range(2):
        with pytest.raises(GrammarError, match="Invalid type"):
            backend.compile(GrammarSpec("json_schema", '{"type": "x"}'))
    backend.close()

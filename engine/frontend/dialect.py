"""How one model thinks and calls tools: which families it belongs to, and by which tokens.

Chosen once per model, by name or by its chat template. From it follow the grammar of a request,
the fold that reads its output, and how much of that was thinking. It knows no back end of grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.frontend.encoder import Encoder
from engine.frontend.families import check_families, reasoning_family_of, tool_family_of
from engine.frontend.message_fold import CallIds, MessageFold
from engine.frontend.openai import ChatCompletionRequest
from engine.frontend.reasoning import ReasoningSplit, ReasoningState
from engine.frontend.response_format import NamedGrammar, grammar_of
from engine.frontend.sampling_params import GrammarSpec, SamplingParams, ThinkingSpan
from engine.frontend.tool_choice import ToolUse, tool_use

_TAIL_TOKENS = 8


class Dialect:
    """The families of one model. Thread-safe.

    Names None are found by the template: the first tool family whose marks it has, else Hermes,
    which is what a template without tools is told in; a reasoning family only if it has its marks.
    """

    def __init__(
        self,
        encoder: Encoder,
        template: str | None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Choose the families; ConfigError for a name that is none."""
        check_families(tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
        self._encoder = encoder
        self.tool_family = tool_family_of(template or "", tool_call_parser)
        self.reasoning = reasoning_family_of(template or "", reasoning_parser)
        self._begin_id = self._end_id = None
        if self.reasoning is not None:
            self._begin_id = encoder.token_id(self.reasoning.begin)
            self._end_id = encoder.token_id(self.reasoning.end)

    def conversation(
        self, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]
    ) -> Conversation:
        """Return what holds for the answers to one chat."""
        state: ReasoningState | None = None
        if self.reasoning is not None:
            tail = self._encoder.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
            state = self.reasoning.start(tail)
        use = tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        return Conversation(self, state, use, grammar_of(request))

    def thinking_span(self, state: ReasoningState | None) -> ThinkingSpan | None:
        """Return what may precede a grammar; None where the marks are no single tokens."""
        if self._end_id is None or state in (None, "answering"):
            return None
        if state == "thinking":
            return ThinkingSpan(self._end_id)
        if self._begin_id is None:
            return None
        return ThinkingSpan(self._end_id, self._begin_id)

    def call_grammar(self, use: ToolUse, otherwise: GrammarSpec | None) -> GrammarSpec:
        """Return the grammar of calls, or of calls and another answer in JSON."""
        schema: dict[str, Any] | None = None
        if otherwise is not None:
            is_object = otherwise.kind == "json_object"
            schema = {"type": "object"} if is_object else msgspec.json.decode(otherwise.text)
        grammar = self.tool_family.grammar(use, token_id=self._encoder.token_id, otherwise=schema)
        return GrammarSpec("tool_calls", msgspec.json.encode(grammar).decode())

    def hides_marks_of(self, use: ToolUse | None) -> bool:
        """Tell whether a text without special tokens lacks marks that its reader needs."""
        marks = [] if use is None else [self.tool_family.open, self.tool_family.begin]
        marks += [] if self.reasoning is None else [self.reasoning.begin, self.reasoning.end]
        found = [self._encoder.token_id(mark) for mark in marks if mark]
        return any(each is not None and not self._encoder.decode([each]) for each in found)

    def num_reasoning_tokens(
        self, token_ids: Sequence[int], state: ReasoningState | None, reasoning: str
    ) -> int:
        """Count the tokens between the marks; where these are no tokens, those of the text."""
        if state in (None, "answering"):
            return 0
        if self._end_id is None:
            return len(self._encoder.encode(reasoning, add_special_tokens=False))
        start = 0
        if self._begin_id is not None and self._begin_id in token_ids[:_TAIL_TOKENS]:
            start = list(token_ids[:_TAIL_TOKENS]).index(self._begin_id) + 1
        elif state == "undecided":
            return 0
        thought = list(token_ids[start:])
        return thought.index(self._end_id) if self._end_id in thought else len(thought)


class Conversation:
    """What holds for every choice that answers one chat."""

    def __init__(
        self,
        dialect: Dialect,
        state: ReasoningState | None,
        use: ToolUse | None,
        asked: NamedGrammar | None,
    ) -> None:
        self._dialect = dialect
        self._use = use
        self.grammar = self._grammar(asked)
        self._state = state
        if self.grammar is not None:
            span = dialect.thinking_span(state)
            spec = msgspec.structs.replace(self.grammar.spec, thinking=span)
            self.grammar = NamedGrammar(self.grammar.param, spec)
            # Where thinking cannot be told from an answer by a token, the grammar leaves it out.
            self._state = state if span is not None or state is None else "answering"

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return how the choices are sampled and shown, given what the request says."""
        skips = params.skip_special_tokens and not self._dialect.hides_marks_of(self._use)
        spec = self.grammar.spec if self.grammar is not None else None
        return msgspec.structs.replace(params, grammar=spec, skip_special_tokens=skips)

    def fold(self, ids: CallIds) -> MessageFold:
        """Return the fold that reads one choice."""
        family, use, state = self._dialect.tool_family, self._use, self._state
        split = None
        if self._dialect.reasoning is not None and state is not None:
            split = ReasoningSplit(self._dialect.reasoning, state)
        if use is None:
            return MessageFold(ids, split=split)
        return MessageFold(
            msgspec.structs.replace(ids, num_chars=family.id_chars),
            split=split,
            tools=family.parser([function.name for function in use.functions]),
            only_one_call=not use.parallel,
        )

    def num_reasoning_tokens(self, token_ids: Sequence[int], fold: MessageFold) -> int | None:
        """Count a choice's thinking; None for a model that does not think."""
        if self._dialect.reasoning is None:
            return None
        return self._dialect.num_reasoning_tokens(token_ids, self._state, fold.reasoning)

    def _grammar(self, asked: NamedGrammar | None) -> NamedGrammar | None:
        if self._use is not None and self._use.must_call:
            return NamedGrammar("tools", self._dialect.call_grammar(self._use, None))
        if self._use is not None and asked is not None:
            return NamedGrammar(asked.param, self._dialect.call_grammar(self._use, asked.spec))
        return asked

"""What the output of one replica's model must look like, and how it is read.

It brings together the model's dialect and a back end that says whether a grammar can be compiled,
so that a client is told before its request reaches the engine. It blocks while it compiles, so it
is called off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.frontend.dialect import Conversation, Dialect
from engine.frontend.encoder import Encoder
from engine.frontend.errors import invalid_value
from engine.frontend.openai import ChatCompletionRequest, CompletionRequest
from engine.frontend.response_format import NamedGrammar, grammar_of
from engine.frontend.tokenizer_bundle import TokenizerBundle
from engine.grammar import GrammarError
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend


class OutputRules:
    """The rules of one model. Thread-safe.

    ConfigError when a parser is named that does not exist.
    """

    def __init__(
        self,
        bundle: TokenizerBundle,
        encoder: Encoder,
        *,
        vocab_size: int,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._dialect = Dialect(
            encoder,
            bundle.chat_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        self._grammars = LlguidanceBackend(
            lambda: GrammarTokenizer.of(bundle, encoder), vocab_size=vocab_size
        )

    def conversation(
        self, request: ChatCompletionRequest | CompletionRequest, prompt_token_ids: Sequence[int]
    ) -> Conversation | None:
        """Return what holds for a chat's answers, None for a completion.

        Raises RequestError naming the field of a grammar that cannot be compiled.
        """
        if isinstance(request, CompletionRequest):
            self._check(grammar_of(request))
            return None
        conversation = self._dialect.conversation(request, prompt_token_ids)
        self._check(conversation.grammar)
        return conversation

    def close(self) -> None:
        """Stop compiling."""
        self._grammars.close()

    def _check(self, grammar: NamedGrammar | None) -> None:
        if grammar is None:
            return
        try:
            self._grammars.compile(grammar.spec)
        except GrammarError as error:
            raise invalid_value(grammar.param, str(error)) from None

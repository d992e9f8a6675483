"""From a request to the token ids of its prompts: template, then tokenizer.

Gateway and replica both prompt through this module, so their token ids are equal. Rendering
follows `apply_chat_template` of Hugging Face. It knows no sampling and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.frontend.conversation import turns_of
from engine.frontend.encoder import Encoder
from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from engine.frontend.params import check_token_ids, requested_max_tokens
from engine.frontend.tokenizer_bundle import TokenizerBundle
from engine.frontend.tool_choice import offered_tools
from engine.frontend.tool_prompt import turns_without_tools
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError

# What a template may raise when a conversation does not suit it: it is foreign code.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class PromptEncoder:
    """Turns requests into prompt token ids for one model. Thread-safe.

    `max_model_len` bounds what is worth tokenizing; whether a prompt fits together with its
    output is decided in params.py.
    """

    def __init__(
        self,
        bundle: TokenizerBundle,
        *,
        clock: Clock,
        max_model_len: int,
        encoder: Encoder | None = None,
    ) -> None:
        """Load tokenizer and template; raise ConfigError when one of them cannot be used.

        `encoder` is the bundle's, if it has been loaded already.
        """
        self.encoder = encoder or Encoder(bundle)
        self._max_model_len = max_model_len
        self._template = _compile(bundle.chat_template, clock)
        self._knows_tools = re.search(r"\btools\b", bundle.chat_template or "") is not None

    def chat(self, request: ChatCompletionRequest, *, scope: str | None = None) -> list[int]:
        """Return the token ids of a conversation; raise RequestError naming what is wrong.

        Turns that were encoded in the same `scope` before are looked up.
        """
        return self.encode_chat(request, self.text_of(request), scope=scope)

    def text_of(self, request: ChatCompletionRequest) -> str:
        """Write the conversation of a request as the model's template wants it."""
        return self.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            tools=offered_tools(request.tools, request.tool_choice),
            settings=request.chat_template_kwargs,
        )

    def encode_chat(
        self,
        request: ChatCompletionRequest,
        text: str,
        *,
        scope: str | None = None,
        max_new_chars: int | None = None,
    ) -> list[int]:
        """Return the token ids of what `text_of` has written for a request.

        If more characters than `max_new_chars` would have to be encoded, raises
        TooMuchToEncodeError instead.
        """
        # The template writes the special tokens itself: adding them again would double BOS.
        ids = self.encoder.encode(
            text,
            add_special_tokens=False,
            max_tokens=self._longest(request),
            param="messages",
            scope=scope,
            max_new_chars=max_new_chars,
        )
        if not ids:
            raise _invalid("messages", "the rendered prompt has no tokens")
        return self._truncated(ids, request)

    def completion(
        self, request: CompletionRequest, *, max_new_chars: int | None = None
    ) -> list[list[int]]:
        """Return the token ids of each prompt; raise RequestError naming what is wrong.

        If a prompt has more characters than `max_new_chars`, raises TooMuchToEncodeError instead.
        """
        single = len(request.prompts) == 1
        all_ids: list[list[int]] = []
        for i, prompt in enumerate(request.prompts):
            param = "prompt" if single else f"prompt[{i}]"
            if isinstance(prompt, str):
                ids = self.encoder.encode(
                    prompt,
                    add_special_tokens=True,
                    max_tokens=self._longest(request),
                    param=param,
                    max_new_chars=max_new_chars,
                )
            else:
                ids = prompt
                check_token_ids(ids, vocab_size=self.encoder.vocab_size, param=param)
            if not ids:
                raise _invalid(param, "has no tokens")
            all_ids.append(self._truncated(ids, request))
        return all_ids

    def _longest(self, request: ChatCompletionRequest | CompletionRequest) -> int | None:
        """Return how many tokens are worth having; None when it is cut anyway."""
        return self._max_model_len if request.truncate_prompt_tokens is None else None

    def _truncated(
        self, ids: list[int], request: ChatCompletionRequest | CompletionRequest
    ) -> list[int]:
        """Keep the last tokens of a prompt, if the request says how many."""
        kept = request.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept > self._max_model_len:
            raise _invalid("truncate_prompt_tokens", f"must be at most {self._max_model_len}")
        if kept == -1:
            kept = max(1, self._max_model_len - (requested_max_tokens(request) or 1))
        return ids[-kept:]

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation as the model's template wants it.

        `settings` reach the template by their names; what we set ourselves outranks them. A
        template that knows no tools gets them, and what came of them, in words.
        """
        if self._template is None:
            raise _invalid("messages", "this model has no chat template; use /v1/completions")
        turns = turns_of(messages)
        if not self._knows_tools:
            turns, tools = turns_without_tools(turns, tools), ()
        variables = {
            **(settings or {}),
            "messages": turns,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.encoder.special_tokens,
        }
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAILURES as error:
            raise _invalid("messages", f"the model's chat template refuses them: {error}") from None


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; to us it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str | None, clock: Clock) -> jinja2.Template | None:
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime(clock)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's filter does: without jinja2's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(clock: Clock) -> Callable[[str], str]:
    def strftime_now(layout: str) -> str:
        return datetime.fromtimestamp(clock.now()).strftime(layout)

    return strftime_now

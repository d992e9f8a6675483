"""From a request to the token ids of its prompts: template, then tokenizer.

Gateway and replica both prompt through this module, so their token ids are equal. Rendering
follows `apply_chat_template` of Hugging Face. It knows no sampling and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.frontend.encoder import Encoder
from engine.frontend.errors import RequestError
from engine.frontend.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from engine.frontend.params import check_token_ids
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError

_ROLES = ("system", "developer", "user", "assistant")
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

    def chat(self, request: ChatCompletionRequest) -> list[int]:
        """Return the token ids of a conversation; raise RequestError naming what is wrong."""
        text = self.render(request.messages, add_generation_prompt=request.add_generation_prompt)
        # The template writes the special tokens itself: adding them again would double BOS.
        ids = self.encoder.encode(
            text,
            add_special_tokens=False,
            max_tokens=self._max_model_len,
            param="messages",
        )
        if not ids:
            raise _invalid("messages", "the rendered prompt has no tokens")
        return ids

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt; raise RequestError naming what is wrong."""
        single = len(request.prompts) == 1
        all_ids: list[list[int]] = []
        for i, prompt in enumerate(request.prompts):
            param = "prompt" if single else f"prompt[{i}]"
            if isinstance(prompt, str):
                ids = self.encoder.encode(
                    prompt,
                    add_special_tokens=True,
                    max_tokens=self._max_model_len,
                    param=param,
                )
            else:
                ids = prompt
                check_token_ids(ids, vocab_size=self.encoder.vocab_size, param=param)
            if not ids:
                raise _invalid(param, "has no tokens")
            all_ids.append(ids)
        return all_ids

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """Write a conversation as the model's template wants it."""
        if self._template is None:
            raise _invalid("messages", "this model has no chat template; use /v1/completions")
        turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.encoder.special_tokens,
            )
        except _TEMPLATE_FAILURES as error:
            raise _invalid("messages", f"the model's chat template refuses them: {error}") from None


def _turn(message: ChatMessage, param: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise _invalid(f"{param}.role", f"{message.role!r} is not supported; use one of {known}")
    content = message.content
    if content is None and message.role != "assistant":
        raise _invalid(f"{param}.content", "is required")
    if isinstance(content, list):
        texts = [_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content)]
        content = "\n".join(texts)
    turn = {"role": message.role, "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _part_text(part: dict[str, Any], param: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise _invalid(f"{param}.type", f"{kind!r} parts are not supported; only 'text' is")
    if not isinstance(text, str):
        raise _invalid(f"{param}.text", "must be a string")
    return text


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


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError("invalid_request", f"{param}: {problem}", param=param)

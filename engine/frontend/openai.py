"""OpenAI's chat and completion bodies as Structs: what comes in and what goes out.

Only shapes live here. Which fields are refused and which values are in range is `parse.py`; how
the next tokens are chosen is `params.py`. It knows no HTTP and no tokenizer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.extension import FleetExtension, Progress
from engine.frontend.logprob_shapes import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from engine.frontend.response_format import OutputFormatFields
from engine.frontend.tool_choice import ToolChoice

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]
TokenPrompt = list[int]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides text; `include_obfuscation` is accepted and has no effect.

    `continuous_usage_stats`: every chunk states the usage so far, not only the last.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SentFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was called, with its arguments as a JSON text."""

    name: str
    arguments: str = ""


class SentToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that a client sends back as a part of the conversation."""

    function: SentFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `content` parts are checked where they are rendered (prompt.py).

    `tool_call_id` says which call a tool's turn answers; `reasoning_content` is what an assistant
    thought before it answered.
    """

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


UNSEEN_INTERVAL = 16
"""Tokens at a time of an answer that its client gets whole: fewer chunks cost less."""


class GenerationRequest(OutputFormatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions share.

    `max_tokens` None means the endpoint's default. `prompt_logprobs` is how many alternatives each
    token of the prompt comes with. `truncate_prompt_tokens` keeps so many of its last tokens, -1 as
    many as the model takes. With a `stream_interval` of k, chunks but the first and the last carry
    k tokens. `cache_salt` narrows the sharing of cached blocks. `user`, `prompt_cache_key` and
    `service_tier` are hints for whoever routes.
    """

    model: str
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_interval: int = 1
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    prefixfleet: FleetExtension | None = None

    @property
    def include_usage(self) -> bool:
        """Tell whether a stream of this request ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def states_usage(self) -> bool:
        """Tell whether every chunk of a stream states the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions; `max_completion_tokens` outranks `max_tokens`.

    `tools` stay as they were sent, for the template; so do `chat_template_kwargs`.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each output token: `top_logprobs` of them, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt or several, each a text or a list of token ids.

    With `echo` the answer's text begins with the prompt, and its log probabilities with those of
    the prompt. `best_of` may only say what `n` says.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each output token."""
        return self.logprobs

    @property
    def is_echo_only(self) -> bool:
        """Tell whether nothing but the prompt is asked for."""
        return self.echo and self.max_tokens == 0

    @property
    def prompts(self) -> list[str | TokenPrompt]:
        """The prompts as a list, also when there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [item for item in self.prompt if isinstance(item, int)]
        if token_ids:
            return [token_ids]
        return [item for item in self.prompt if not isinstance(item, int)]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt was not computed because its blocks were cached."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How much of the output was thinking."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; a prompt counts once, however many choices it has.

    `completion_tokens_details` is there for models that think.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model calls; `arguments` are a JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tool call."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name once, then fragments of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the call number `index`; id and type come with its first part only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a finished choice; one that only calls tools has no content."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A finished choice. `stop_reason` names the stop string or stop token id that ended it."""

    index: int
    message: AssistantMessage
    finish_reason: OpenAIFinishReason
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a chat completion that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """News of one choice; the role comes with its first chunk only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream; the usage chunk has no choices.

    `prefixfleet` is for the gateway alone, which cuts it off: it stays the last field.
    """

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prefixfleet: Progress | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a completion, finished or (in a chunk) as far as it is new."""

    index: int
    text: str
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a completion, and one event of its stream: OpenAI gives both one shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    prefixfleet: Progress | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the model list.

    Of a LoRA adapter, `parent` is the model that it adapts and `root` the folder it comes from.
    """

    id: str
    created: int
    max_model_len: int | None = None
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "prefixfleet"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


def usage_of(
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None = None,
) -> Usage:
    """Sum up a request in OpenAI's form; `num_reasoning_tokens` None says nothing of thinking."""
    details: CompletionTokensDetails | UnsetType = UNSET
    if num_reasoning_tokens is not None:
        details = CompletionTokensDetails(num_reasoning_tokens)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        completion_tokens_details=details,
    )

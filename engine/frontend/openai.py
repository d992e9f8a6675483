"""OpenAI's chat and completion bodies as Structs: what comes in and what goes out.

Only shapes live here. Which fields are refused and which values are in range is `parse.py`; how
the next tokens are chosen is `params.py`. It knows no HTTP and no tokenizer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.extension import FleetExtension, Progress

OpenAIFinishReason = Literal["stop", "length"]
TokenPrompt = list[int]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides text; `include_obfuscation` is accepted and has no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `content` parts are checked where they are rendered (prompt.py)."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions share.

    `max_tokens` None means the endpoint's default. `cache_salt` narrows the sharing of cached
    blocks. `user`, `prompt_cache_key` and `service_tier` are hints for whoever routes.
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
    return_token_ids: bool = False
    stream: bool = False
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


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions; `max_completion_tokens` outranks `max_tokens`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt or several, each a text or a list of token ids."""

    prompt: str | list[str | int | list[int]]

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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a finished choice."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A finished choice. `stop_reason` names the stop string or stop token id that ended it."""

    index: int
    message: AssistantMessage
    finish_reason: OpenAIFinishReason
    stop_reason: str | int | None = None
    logprobs: None = None
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


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one choice; the role comes with its first chunk only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None
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
    prefixfleet: Progress | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a completion, finished or (in a chunk) as far as it is new."""

    index: int
    text: str
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


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
    """One entry of the model list."""

    id: str
    created: int
    max_model_len: int | None = None
    object: Literal["model"] = "model"
    owned_by: str = "prefixfleet"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


def usage_of(*, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    """Sum up a request in OpenAI's form."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
    )

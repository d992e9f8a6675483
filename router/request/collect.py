"""Folds the stream of a replica of ours into the one answer of a request that is not streamed.

Because it is a stream underneath, the gateway knows when the first token came, notices a hung
replica early, and can start again elsewhere until the very end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.logprob_shapes import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    joined,
    joined_chat,
)
from engine.frontend.message_sum import MessageSum
from engine.frontend.openai import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    OpenAIFinishReason,
    Usage,
)
from kvindex.foundation.errors import WireError
from router.request.body import Endpoint

_chat_decoder = msgspec.json.Decoder(list[ChatCompletionChunk])
_completion_decoder = msgspec.json.Decoder(list[Completion])
_Decoder = msgspec.json.Decoder[list[ChatCompletionChunk]] | msgspec.json.Decoder[list[Completion]]


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    message: MessageSum = field(default_factory=MessageSum)
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    chat_logprobs: ChatLogprobs | None = None
    completion_logprobs: CompletionLogprobs | None = None

    def add(
        self,
        text: str,
        *,
        finish_reason: OpenAIFinishReason | None,
        stop_reason: str | int | UnsetType | None,
        token_ids: list[int] | UnsetType,
    ) -> None:
        self.text.append(text)
        self.finish_reason = finish_reason or self.finish_reason
        if stop_reason is not UNSET and stop_reason is not None:
            self.stop_reason = stop_reason
        if token_ids is not UNSET:
            if self.token_ids is UNSET:
                self.token_ids = []
            self.token_ids += token_ids


class ChunkFold:
    """Chunks in, in order, each known to be JSON; `result` when the stream has ended with [DONE].

    Raises WireError when the replica sent something that is no chunk, or ended unfinished.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        is_chat = endpoint == "chat/completions"
        self._decoder: _Decoder = _chat_decoder if is_chat else _completion_decoder
        self._choices: dict[int, _Choice] = {}
        self._first: ChatCompletionChunk | Completion | None = None
        self._usage: Usage | None = None
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET

    def add(self, several: Sequence[bytes]) -> None:
        """Take chunks that came together: to decode them at once costs half as much."""
        try:
            chunks = self._decoder.decode(b"[" + b",".join(several) + b"]")
        except msgspec.DecodeError as error:
            raise WireError(f"chunk of a replica: {error}") from None
        for chunk in chunks:
            if self._first is None:
                self._first = chunk
            if chunk.usage:
                self._usage = chunk.usage
            if isinstance(chunk, ChatCompletionChunk):
                self._add_chat(chunk)
            else:
                self._add_completion(chunk)

    def result(self) -> ChatCompletion | Completion:
        """Return the whole answer."""
        if self._first is None or self._usage is None:
            raise WireError("stream of a replica: it ended without a chunk or without usage")
        if isinstance(self._first, ChatCompletionChunk):
            return ChatCompletion(
                id=self._first.id,
                created=self._first.created,
                model=self._first.model,
                choices=[self._chat_choice(i) for i in sorted(self._choices)],
                usage=self._usage,
                prompt_token_ids=self._prompt_token_ids,
                prompt_logprobs=self._prompt_logprobs,
            )
        return Completion(
            id=self._first.id,
            created=self._first.created,
            model=self._first.model,
            choices=[self._completion_choice(i) for i in sorted(self._choices)],
            usage=self._usage,
        )

    def _begin(self, index: int) -> _Choice:
        choice = self._choices[index] = _Choice()
        return choice

    def _add_chat(self, chunk: ChatCompletionChunk) -> None:
        if chunk.prompt_token_ids is not UNSET:
            self._prompt_token_ids = chunk.prompt_token_ids
        if chunk.prompt_logprobs is not UNSET:
            self._prompt_logprobs = chunk.prompt_logprobs
        for part in chunk.choices:
            choice = self._choices.get(part.index) or self._begin(part.index)
            if part.logprobs is not None:
                choice.chat_logprobs = joined_chat(choice.chat_logprobs, part.logprobs)
            try:
                choice.message.add(part.delta)
            except ValueError as error:
                raise WireError(f"chunk of a replica: {error}") from None
            if part.finish_reason is not None or part.token_ids is not UNSET:
                choice.add(
                    "",
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    token_ids=part.token_ids,
                )

    def _add_completion(self, chunk: Completion) -> None:
        for part in chunk.choices:
            choice = self._choices.get(part.index) or self._begin(part.index)
            choice.add(
                part.text,
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                token_ids=part.token_ids,
            )
            if part.prompt_token_ids is not UNSET:
                choice.prompt_token_ids = part.prompt_token_ids
            if part.prompt_logprobs is not UNSET:
                choice.prompt_logprobs = part.prompt_logprobs
            if part.logprobs is not None:
                choice.completion_logprobs = joined(choice.completion_logprobs, part.logprobs)

    def _chat_choice(self, index: int) -> ChatChoice:
        choice = self._choices[index]
        return ChatChoice(
            index=index,
            message=choice.message.message(),
            finish_reason=_finished(choice, index),
            stop_reason=choice.stop_reason,
            logprobs=choice.chat_logprobs,
            token_ids=choice.token_ids,
        )

    def _completion_choice(self, index: int) -> CompletionChoice:
        choice = self._choices[index]
        return CompletionChoice(
            index=index,
            text="".join(choice.text),
            finish_reason=_finished(choice, index),
            stop_reason=choice.stop_reason,
            logprobs=choice.completion_logprobs,
            token_ids=choice.token_ids,
            prompt_token_ids=choice.prompt_token_ids,
            prompt_logprobs=choice.prompt_logprobs,
        )


def _finished(choice: _Choice, index: int) -> OpenAIFinishReason:
    if choice.finish_reason is None:
        raise WireError(f"stream of a replica: choice {index} ended without a finish reason")
    return choice.finish_reason

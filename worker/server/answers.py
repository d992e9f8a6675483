"""How a generation looks in OpenAI's shapes: whole answers and the chunks of a stream.

Pure: deltas and folds in, Structs out. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.encoder import Encoder
from engine.frontend.logprob_shapes import ChatLogprobs, chat_logprobs
from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.message_fold import MessageFold
from engine.frontend.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    Completion,
    CompletionChoice,
    OpenAIFinishReason,
)
from engine.frontend.output_fold import Delta, FoldFinishReason
from worker.server.choices import ChoiceDelta
from worker.server.generation import Choice, Generation
from worker.server.shown_logprobs import (
    shown_echo_logprobs,
    shown_logprobs,
    shown_prompt_logprobs,
    shown_whole_logprobs,
)


class Answer(Protocol):
    """The shape of one endpoint's answers to one generation."""

    def opening(self, choice: Choice) -> msgspec.Struct | None:
        """Return the chunk that precedes a choice's first text, if the shape has one."""
        ...

    def chunk(self, news: ChoiceDelta) -> msgspec.Struct | None:
        """Return the chunk for a delta, without its progress; None when it shows nothing yet."""
        ...

    def usage_chunk(self) -> msgspec.Struct:
        """Return the last chunk of a stream that asked for usage."""
        ...

    def whole(self) -> msgspec.Struct:
        """Return the answer that is not streamed, once every choice has ended."""
        ...


def answer_for(generation: Generation, *, encoder: Encoder, created: int) -> Answer:
    """Pick the shape that the request's endpoint answers in; a resumed one keeps its instant."""
    created = generation.created or created
    if isinstance(generation.request, ChatCompletionRequest):
        return ChatAnswer(generation, encoder=encoder, created=created)
    return CompletionAnswer(generation, encoder=encoder, created=created)


class ChatAnswer:
    """Answers of /v1/chat/completions."""

    def __init__(self, generation: Generation, *, encoder: Encoder, created: int) -> None:
        self._generation = generation
        self._encoder = encoder
        self._created = created
        self._id = f"chatcmpl-{generation.request_id}"
        self._returns_ids = generation.request.return_token_ids

    def opening(self, choice: Choice) -> ChatCompletionChunk:
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk(ChatChunkChoice(index=choice.index, delta=delta))
        return msgspec.structs.replace(
            chunk,
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=shown_prompt_logprobs(self._generation, choice, self._encoder)
            if choice.index == 0
            else UNSET,
        )

    def chunk(self, news: ChoiceDelta) -> ChatCompletionChunk | None:
        delta, choice = news.delta, news.choice
        assert choice.message is not None, "a chat's choice has a message"
        shown = choice.message.push(delta.text, is_last=delta.finish_reason is not None)
        if shown == ChatDelta() and not _is_shown(delta, self._generation):
            return None
        return self._chunk(
            ChatChunkChoice(
                index=news.choice.index,
                delta=shown,
                finish_reason=_chat_finish_reason(delta.finish_reason, choice.message),
                stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
                logprobs=self._logprobs(delta.logprobs),
                token_ids=delta.token_ids if self._returns_ids else UNSET,
            )
        )

    def usage_chunk(self) -> ChatCompletionChunk:
        return msgspec.structs.replace(self._chunk(), usage=self._generation.usage())

    def whole(self) -> ChatCompletion:
        generation = self._generation
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=generation.request.model,
            choices=[self._finished(choice) for choice in generation.choices],
            usage=generation.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=shown_prompt_logprobs(generation, generation.choices[0], self._encoder),
        )

    def _finished(self, choice: Choice) -> ChatChoice:
        fold, message = choice.fold, choice.message
        assert fold.finish_reason is not None, "not every choice has ended"
        assert message is not None, "a chat's choice has a message"
        message.push(fold.text[choice.resumed_text_length :], is_last=True)
        return ChatChoice(
            index=choice.index,
            message=message.message(),
            finish_reason=_chat_finish_reason(fold.finish_reason, message) or "stop",
            stop_reason=fold.stop_reason,
            logprobs=self._logprobs(fold.logprobs),
            token_ids=fold.token_ids if self._returns_ids else UNSET,
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._generation.request.model,
            choices=list(choices),
            usage=self._generation.chunk_usage(),
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        asked = self._generation.request.num_logprobs is not None
        return chat_logprobs(entries, self._encoder) if asked else None

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.prompts[0] if self._returns_ids else UNSET


class CompletionAnswer:
    """Answers of /v1/completions."""

    def __init__(self, generation: Generation, *, encoder: Encoder, created: int) -> None:
        self._generation = generation
        self._encoder = encoder
        self._created = created
        self._id = f"cmpl-{generation.request_id}"
        self._returns_ids = generation.request.return_token_ids

    def opening(self, choice: Choice) -> Completion | None:
        generation = self._generation
        echo = generation.echo_of(choice)
        scores = shown_prompt_logprobs(generation, choice, self._encoder)
        if not self._returns_ids and echo is None and scores is UNSET:
            return None
        return self._completion(
            CompletionChoice(
                index=choice.index,
                text="" if echo is None else echo.text,
                logprobs=shown_echo_logprobs(generation, choice, self._encoder),
                prompt_token_ids=generation.prompt_of(choice) if self._returns_ids else UNSET,
                prompt_logprobs=scores,
            )
        )

    def chunk(self, news: ChoiceDelta) -> Completion | None:
        delta = news.delta
        if not delta.text and not _is_shown(delta, self._generation):
            return None
        return self._completion(
            CompletionChoice(
                index=news.choice.index,
                text=delta.text,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
                logprobs=shown_logprobs(
                    self._generation,
                    news.choice,
                    delta.logprobs,
                    delta.text_offsets,
                    encoder=self._encoder,
                ),
                token_ids=delta.token_ids if self._returns_ids else UNSET,
            )
        )

    def usage_chunk(self) -> Completion:
        return msgspec.structs.replace(self._completion(), usage=self._generation.usage())

    def whole(self) -> Completion:
        choices = [self._finished(choice) for choice in self._generation.choices]
        return msgspec.structs.replace(self._completion(*choices), usage=self._generation.usage())

    def _finished(self, choice: Choice) -> CompletionChoice:
        fold, echo = choice.fold, self._generation.echo_of(choice)
        ids = self._returns_ids
        return CompletionChoice(
            index=choice.index,
            text=fold.text if echo is None else echo.text + fold.text,
            finish_reason=fold.finish_reason,
            stop_reason=fold.stop_reason,
            logprobs=shown_whole_logprobs(self._generation, choice, self._encoder),
            token_ids=fold.token_ids if ids else UNSET,
            prompt_token_ids=self._generation.prompt_of(choice) if ids else UNSET,
            prompt_logprobs=shown_prompt_logprobs(self._generation, choice, self._encoder),
        )

    def _completion(self, *choices: CompletionChoice) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._generation.request.model,
            choices=list(choices),
            usage=self._generation.chunk_usage(),
        )


def _is_shown(delta: Delta, generation: Generation) -> bool:
    """Tell whether a delta says something even if it adds no text."""
    shows_ids = generation.request.return_token_ids and delta.token_ids
    return bool(delta.finish_reason or delta.logprobs or shows_ids)


def _chat_finish_reason(
    reason: FoldFinishReason | None, message: MessageFold
) -> OpenAIFinishReason | None:
    """Say that a choice ended in order to have tools called."""
    return "tool_calls" if reason == "stop" and message.has_calls else reason

"""How a generation looks in OpenAI's shapes: whole answers and the chunks of a stream.

Pure: deltas and folds in, Structs out. It knows no HTTP.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    Completion,
    CompletionChoice,
)
from worker.server.choices import ChoiceDelta
from worker.server.generation import Choice, Generation


class Answer(Protocol):
    """The shape of one endpoint's answers to one generation."""

    def opening(self, choice: Choice) -> msgspec.Struct | None:
        """Return the chunk that precedes a choice's first text, if the shape has one."""
        ...

    def chunk(self, news: ChoiceDelta) -> msgspec.Struct:
        """Return the chunk for a delta, without its progress."""
        ...

    def usage_chunk(self) -> msgspec.Struct:
        """Return the last chunk of a stream that asked for usage."""
        ...

    def whole(self) -> msgspec.Struct:
        """Return the answer that is not streamed, once every choice has ended."""
        ...


def answer_for(generation: Generation, *, created: int) -> Answer:
    """Pick the shape that the request's endpoint answers in; a resumed one keeps its instant."""
    created = generation.created or created
    if isinstance(generation.request, ChatCompletionRequest):
        return ChatAnswer(generation, created=created)
    return CompletionAnswer(generation, created=created)


class ChatAnswer:
    """Answers of /v1/chat/completions."""

    def __init__(self, generation: Generation, *, created: int) -> None:
        self._generation = generation
        self._created = created
        self._id = f"chatcmpl-{generation.request_id}"
        self._returns_ids = generation.request.return_token_ids

    def opening(self, choice: Choice) -> ChatCompletionChunk:
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk(ChatChunkChoice(index=choice.index, delta=delta))
        return msgspec.structs.replace(chunk, prompt_token_ids=self._prompt_token_ids())

    def chunk(self, news: ChoiceDelta) -> ChatCompletionChunk:
        delta = news.delta
        return self._chunk(
            ChatChunkChoice(
                index=news.choice.index,
                delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
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
        )

    def _finished(self, choice: Choice) -> ChatChoice:
        fold = choice.fold
        assert fold.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=fold.text),
            finish_reason=fold.finish_reason,
            stop_reason=fold.stop_reason,
            token_ids=fold.token_ids if self._returns_ids else UNSET,
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._generation.request.model,
            choices=list(choices),
            usage=None if self._generation.request.include_usage else UNSET,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.prompts[0] if self._returns_ids else UNSET


class CompletionAnswer:
    """Answers of /v1/completions."""

    def __init__(self, generation: Generation, *, created: int) -> None:
        self._generation = generation
        self._created = created
        self._id = f"cmpl-{generation.request_id}"
        self._returns_ids = generation.request.return_token_ids

    def opening(self, choice: Choice) -> Completion | None:
        if not self._returns_ids:
            return None
        prompt_token_ids = self._generation.prompt_of(choice)
        return self._completion(
            CompletionChoice(index=choice.index, text="", prompt_token_ids=prompt_token_ids)
        )

    def chunk(self, news: ChoiceDelta) -> Completion:
        delta = news.delta
        return self._completion(
            CompletionChoice(
                index=news.choice.index,
                text=delta.text,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
                token_ids=delta.token_ids if self._returns_ids else UNSET,
            )
        )

    def usage_chunk(self) -> Completion:
        return msgspec.structs.replace(self._completion(), usage=self._generation.usage())

    def whole(self) -> Completion:
        choices = [self._finished(choice) for choice in self._generation.choices]
        return msgspec.structs.replace(self._completion(*choices), usage=self._generation.usage())

    def _finished(self, choice: Choice) -> CompletionChoice:
        fold = choice.fold
        ids = self._returns_ids
        return CompletionChoice(
            index=choice.index,
            text=fold.text,
            finish_reason=fold.finish_reason,
            stop_reason=fold.stop_reason,
            token_ids=fold.token_ids if ids else UNSET,
            prompt_token_ids=self._generation.prompt_of(choice) if ids else UNSET,
        )

    def _completion(self, *choices: CompletionChoice) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._generation.request.model,
            choices=list(choices),
            usage=None if self._generation.request.include_usage else UNSET,
        )

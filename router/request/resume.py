"""What has reached the gateway of an answer, so that another replica can go on from there.

It keeps token ids and lengths, never text: replicas rebuild the text from the tokens. Whether a
stream is resumed is dispatch's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from engine.frontend.extension import Resume, ResumedChoice
from router.request.chunks import Chunk


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass(slots=True)
class Transcript:
    """The progress of every choice as of the last chunk that was passed on.

    `execution` is the digest of what computed it: only such a replica can go on token for token.
    """

    execution: str | None = None
    _created: int | None = None
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _has_gap: bool = False

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices.values())

    @property
    def can_be_resumed(self) -> bool:
        """Whether all of the output is known by its tokens; False while there is none."""
        return self._created is not None and self.num_tokens > 0 and not self._has_gap

    def take(self, chunks: Sequence[Chunk], *, execution: str | None) -> None:
        """Note chunks that have been passed on; what is without progress cannot be gone on from."""
        for chunk in chunks:
            if not chunk.choices:
                continue
            progress = chunk.prefixfleet
            if progress is UNSET:
                self._has_gap = True
                continue
            self.execution = execution
            if self._created is None:
                self._created = chunk.created
            choice = self._choices.get(progress.choice)
            if choice is None:
                choice = self._choices[progress.choice] = _Choice()
            choice.token_ids += progress.token_ids
            choice.text_length = progress.text_length
            choice.num_cached_tokens = progress.num_cached_tokens or choice.num_cached_tokens
            choice.finished = choice.finished or chunk.choices[0].finish_reason is not None

    def resume(self) -> Resume | None:
        """Return what a replica needs to go on, None when it has to begin."""
        if self._created is None or not self.can_be_resumed:
            return None
        return Resume(
            created=self._created,
            choices=[
                ResumedChoice(
                    index=index,
                    token_ids=choice.token_ids,
                    text_length=choice.text_length,
                    num_cached_tokens=choice.num_cached_tokens,
                    finished=choice.finished,
                )
                for index, choice in sorted(self._choices.items())
            ],
        )

    def clear(self) -> None:
        """Forget everything: the answer begins anew."""
        self.execution = None
        self._created = None
        self._choices.clear()
        self._has_gap = False

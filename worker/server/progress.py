"""What the chunks of a generation have told its gateway so far, per choice.

It counts what is handed out, not what is computed: a fold may be ahead of its reader. It knows
neither HTTP nor what becomes of a report.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.frontend.extension import Progress
from worker.server.choices import ChoiceDelta
from worker.server.generation import Choice


@dataclass(slots=True)
class _Reported:
    text_length: int = 0
    new_token_ids: list[int] = field(default_factory=list)


class ProgressLog:
    """Counts deltas as they are taken; `report` says what came since the last one."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._choices = {c.index: _Reported(c.resumed_text_length) for c in choices}

    def take(self, news: ChoiceDelta) -> None:
        """Note a delta that is about to be shown, or that shows nothing yet."""
        reported = self._choices[news.choice.index]
        reported.text_length += len(news.delta.text)
        reported.new_token_ids += news.delta.token_ids

    def report(self, choice: Choice) -> Progress:
        """Return how far a choice is, and begin anew."""
        reported = self._choices[choice.index]
        new, reported.new_token_ids = reported.new_token_ids, []
        return Progress(
            choice=choice.index,
            token_ids=new,
            text_length=reported.text_length,
            num_cached_tokens=choice.num_cached_tokens,
        )

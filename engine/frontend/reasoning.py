"""What a model thinks before it answers, told apart from the answer.

A pure fold over text: what it gives depends on all that was pushed, never on how it was cut. It
knows families of models by their marks, and no tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.frontend.stop import num_held_back


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Marks around what is thought. `starts_open`: an output begins thinking without a mark."""

    begin: str
    end: str
    starts_open: bool = False

    def start(self, prompt_tail: str) -> ReasoningState:
        """Tell how an output begins, by how its prompt ends."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.end):
            return "answering"
        if tail.endswith(self.begin) or self.starts_open:
            return "thinking"
        return "undecided"


ReasoningState = Literal["undecided", "thinking", "answering"]

REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(begin="<think>", end="</think>", starts_open=True),
    "qwen3": ReasoningFamily(begin="<think>", end="</think>"),
    "mistral": ReasoningFamily(begin="[THINK]", end="[/THINK]"),
}
"""By the name that `worker.reasoning_parser` may have."""


class ReasoningSplit:
    """Text in; what was thought and what is answered out.

    Line breaks next to the marks belong to neither. Thinking that never ends is all there is.
    """

    __slots__ = ("_family", "_has_text", "_held", "state")

    def __init__(self, family: ReasoningFamily, state: ReasoningState) -> None:
        self._family = family
        self._held = ""
        self._has_text = False
        self.state = state

    def push(self, text: str) -> tuple[str, str]:
        """Take text; return what is certain of (reasoning, answer)."""
        self._held += text
        if self.state == "undecided":
            self._decide()
        reasoning = self._think() if self.state == "thinking" else ""
        answer = self._answer() if self.state == "answering" else ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Return what was held back, when no text follows."""
        held, self._held = self._held, ""
        if self.state == "thinking":
            if not self._has_text:
                held = held.lstrip("\n")
            return held, ""
        return "", held

    def _decide(self) -> None:
        """Look whether the output begins with a mark; until that is clear, nothing is shown."""
        begin, text = self._family.begin, self._held.lstrip()
        if text.startswith(begin):
            self._held = text.removeprefix(begin)
            self.state = "thinking"
        elif not begin.startswith(text):
            self.state = "answering"
            self._has_text = True

    def _think(self) -> str:
        if not self._has_text:
            self._held = self._held.lstrip("\n")
        shown, self._held, has_ended = before_mark(self._held, self._family.end, space="\n")
        self._has_text = not has_ended and (self._has_text or bool(shown))
        if has_ended:
            self.state = "answering"
        return shown

    def _answer(self) -> str:
        if not self._has_text:
            self._held = self._held.lstrip("\n")
            self._has_text = bool(self._held)
        shown, self._held = self._held, ""
        return shown


def before_mark(text: str, mark: str, *, space: str | None = None) -> tuple[str, str, bool]:
    """Return what certainly stands before a mark, what is left to look at, and if it was found.

    `space` next to the mark (None: all white space) belongs to it.
    """
    before, found, behind = text.partition(mark)
    if found:
        return before.rstrip(space), behind, True
    num_held = num_held_back(text, [mark], scan_from=0)
    safe = len(text[: len(text) - num_held].rstrip(space))
    return text[:safe], text[safe:], False

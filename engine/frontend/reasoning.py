"""What a model thinks before it answers, told apart from the answer.

A pure fold over text: what it gives depends on all that was pushed, never on how it was cut. It
knows families of models by their marks, and no tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec


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
        end = self._family.end
        found = self._held.find(end)
        if found >= 0:
            shown = self._held[:found].rstrip("\n")
            self._held = self._held[found + len(end) :]
            self.state = "answering"
            shown = shown if self._has_text else shown.lstrip("\n")
            self._has_text = False
            return shown
        if not self._has_text:
            self._held = self._held.lstrip("\n")
        safe = len(self._held) - partial_length(self._held, end)
        safe = len(self._held[:safe].rstrip("\n"))
        shown, self._held = self._held[:safe], self._held[safe:]
        self._has_text = self._has_text or bool(shown)
        return shown

    def _answer(self) -> str:
        if not self._has_text:
            self._held = self._held.lstrip("\n")
            self._has_text = bool(self._held)
        shown, self._held = self._held, ""
        return shown


def partial_length(text: str, mark: str) -> int:
    """Return how many last characters of a text may begin a mark that is not in it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

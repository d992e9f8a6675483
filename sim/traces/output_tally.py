"""How many tokens an answer had, counted while it passes by; the answer itself is not kept.

`usage.completion_tokens` where the server sends it; else a chunk of a stream counts as one token.
"""

from __future__ import annotations

import msgspec

_DATA = b"data:"
# Answers longer than this are passed on and not counted.
MAX_JSON_BYTES = 16 << 20


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None

    def has_output(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    choices: tuple[_Choice, ...] = ()


_DECODER = msgspec.json.Decoder(_Answer)


class OutputTally:
    """Takes an answer's bytes in any pieces, JSON or server-sent events."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._pending = bytearray()
        self._num_chunks = 0
        self._num_reported: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next piece; O(len(data))."""
        if len(self._pending) + len(data) > MAX_JSON_BYTES:
            self._pending.clear()
            return
        self._pending += data
        if self._streamed and b"\n" in data:
            *lines, rest = self._pending.split(b"\n")
            self._pending = bytearray(rest)
            for line in lines:
                self._event(bytes(line))

    def num_tokens(self) -> int:
        """Return the count so far; call it once the answer has ended."""
        if not self._streamed:
            self._read(bytes(self._pending))
        return self._num_chunks if self._num_reported is None else self._num_reported

    def _event(self, line: bytes) -> None:
        if line.startswith(_DATA):
            self._read(line.removeprefix(_DATA).strip())

    def _read(self, data: bytes) -> None:
        try:
            answer = _DECODER.decode(data)
        except msgspec.DecodeError:
            # "[DONE]", an error in another shape, or an answer cut off: nothing to count.
            return
        if answer.usage is not None:
            self._num_reported = answer.usage.completion_tokens
        if self._streamed and any(choice.has_output() for choice in answer.choices):
            self._num_chunks += 1

"""Requests that replicas have died of, by a digest of what they ask; refused for a while.

Pure: instants are arguments. What makes a digest, and what counts as a death, the caller knows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Quarantine:
    """Digests with the instant at which each is let go; the oldest make room for new ones."""

    duration_s: float
    max_digests: int
    _until: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is refused, which is nearly always so."""
        return not self._until

    def add(self, digest: bytes, now: float) -> None:
        """Refuse a digest from now on."""
        self._until[digest] = now + self.duration_s
        self._until.move_to_end(digest)
        if len(self._until) > self.max_digests:
            self._until.popitem(last=False)

    def left_s(self, digest: bytes, now: float) -> float | None:
        """Return the seconds for which a digest is still refused, None when it is not."""
        until = self._until.get(digest)
        if until is None:
            return None
        if until <= now:
            del self._until[digest]
            return None
        return until - now

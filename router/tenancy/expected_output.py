"""How many tokens a request will probably generate, from what its tenant's requests did before.

A guess for limits that is corrected at the end; nothing else depends on it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

FIRST_GUESS_TOKENS = 256
"""Expected of a tenant about which nothing is known yet."""
_MEMORY = 128
_QUANTILE = 0.9


@dataclass(slots=True)
class _Outputs:
    """The last outputs of one tenant, in the order of their coming and in that of their size."""

    newest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def note(self, num_tokens: int) -> None:
        if len(self.newest) == _MEMORY:
            del self.ordered[bisect_left(self.ordered, self.newest.popleft())]
        self.newest.append(num_tokens)
        insort(self.ordered, num_tokens)


class ExpectedOutput:
    """Remembers the last outputs of each tenant, in this process."""

    def __init__(self) -> None:
        self._outputs: dict[str, _Outputs] = {}

    def note(self, tenant: str, num_tokens: int) -> None:
        """Remember an output."""
        if tenant not in self._outputs:
            self._outputs[tenant] = _Outputs()
        self._outputs[tenant].note(num_tokens)

    def tokens(self, tenant: str, *, max_tokens: int | None) -> int:
        """Return the tenant's 90th percentile so far, at most what the request allows."""
        outputs, usual = self._outputs.get(tenant), FIRST_GUESS_TOKENS
        if outputs is not None:
            usual = outputs.ordered[int(_QUANTILE * (len(outputs.ordered) - 1))]
        return usual if max_tokens is None else min(usual, max_tokens)

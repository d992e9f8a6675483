"""How many tokens a request will probably generate, from what its tenant's requests did before.

A guess for limits that is corrected at the end; nothing else depends on it.
"""

from __future__ import annotations

from collections import deque

FIRST_GUESS_TOKENS = 256
"""Expected of a tenant about which nothing is known yet."""
_MEMORY = 128
_QUANTILE = 0.9


class ExpectedOutput:
    """Remembers the last outputs of each tenant, in this process."""

    def __init__(self) -> None:
        self._outputs: dict[str, deque[int]] = {}

    def note(self, tenant: str, num_tokens: int) -> None:
        """Remember an output."""
        self._outputs.setdefault(tenant, deque(maxlen=_MEMORY)).append(num_tokens)

    def tokens(self, tenant: str, *, max_tokens: int | None) -> int:
        """Return the tenant's 90th percentile so far, at most what the request allows."""
        outputs = sorted(self._outputs.get(tenant, ()))
        usual = outputs[int(_QUANTILE * (len(outputs) - 1))] if outputs else FIRST_GUESS_TOKENS
        return usual if max_tokens is None else min(usual, max_tokens)

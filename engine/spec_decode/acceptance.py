"""How many guesses were right, over all requests of an engine.

Plain totals; what they say about the next guess is the business of payoff.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """Totals since the engine started; they only grow.

    `num_drafts`: verified rows of guesses. `num_tokens`: guesses in them, of which `num_accepted`
    became output; `accepted_at[i]`: of those, the ones in place i of their row.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def observe(self, *, num_drafted: int, num_accepted: int) -> None:
        """Count one verified row of guesses; the first `num_accepted` were right."""
        self.num_drafts += 1
        self.num_tokens += num_drafted
        self.num_accepted += num_accepted
        while len(self.accepted_at) < num_drafted:
            self.accepted_at.append(0)
        for i in range(num_accepted):
            self.accepted_at[i] += 1

"""Whether bringing blocks back from the host tier beats computing their tokens again.

Both sides are measured: transfers here, prefill in stats.py. It knows no blocks, only numbers.
"""

from __future__ import annotations

from engine.stats import StepRates, blend


class RestoreCost:
    """Compares seconds of transfer with seconds of prefill at the speeds measured so far.

    `blocks_per_s`: exponential average with weight 0.2 over steps that moved blocks between the
    tiers, in either direction; 0 until one did.
    """

    def __init__(self, rates: StepRates) -> None:
        self.blocks_per_s = 0.0
        self._rates = rates

    def observe(self, *, num_blocks: int, transfer_s: float) -> None:
        """Take in the transfers of one step."""
        if not num_blocks or transfer_s <= 0:
            return
        self.blocks_per_s = blend(self.blocks_per_s, num_blocks / transfer_s)

    def is_worth_restoring(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Tell whether moving the blocks takes no longer than computing what they save.

        True while one of the two speeds is unknown: only a restore can measure its own.
        """
        prefill_tokens_per_s = self._rates.prefill_tokens_per_s
        if self.blocks_per_s == 0 or prefill_tokens_per_s == 0:
            return True
        return num_blocks / self.blocks_per_s <= num_tokens / prefill_tokens_per_s

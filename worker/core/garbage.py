"""When Python's garbage collector runs in a process that loads much once and then makes little."""

from __future__ import annotations

import gc


def load_without_collecting() -> None:
    """Collect nothing until `settle_garbage_collector`: what is loaded stays, and is a lot."""
    gc.disable()


def settle_garbage_collector() -> None:
    """Take what is loaded out of garbage collection, and collect the rest, but less often.

    A step makes a few objects per running request and no cycles; with Python's own thresholds the
    collector takes half the time of a step with 1,024 requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()

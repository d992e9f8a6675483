"""What is found by one look over each row of logits: whether it can be used, and its best token.

On a CPU numpy looks, alone: it is done before torch's threads have met, and those would go on
waiting for work on the cores where the next step is computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.runner.request_state import Int64Array


def finite_rows(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Tell of each row of logits [rows, vocab_size] whether all of it is finite."""
    if logits.is_cpu:
        rows = logits.numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            # A sum of finite numbers may overflow, but hardly ever does.
            on_cpu: npt.NDArray[np.bool_] = np.isfinite(rows.sum(axis=-1))
        return on_cpu if on_cpu.all() else np.isfinite(rows).all(axis=-1)
    found: npt.NDArray[np.bool_] = logits.isfinite().all(dim=-1).cpu().numpy()
    return found


def best_tokens(logits: torch.Tensor) -> Int64Array:
    """Return the token with the largest logit of each row [rows, vocab_size], the first of such."""
    if logits.is_cpu:
        on_cpu: Int64Array = logits.numpy().argmax(axis=-1)
        return on_cpu
    found: Int64Array = logits.argmax(dim=-1).cpu().numpy()
    return found

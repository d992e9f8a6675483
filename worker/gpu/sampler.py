"""Samples on the device: by one kernel where nothing but a temperature is asked for.

Truncation, adjustments and masks go the way of worker.runner.sampler, in torch operations on the
same device. Both choose the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from worker.kernels.sampling import Draws, sample_tokens
from worker.runner.request_state import Int64Array
from worker.runner.sampler import sample
from worker.runner.sampling_state import SamplingRows


def sample_on_device(logits: torch.Tensor, rows: SamplingRows) -> Int64Array:
    """Return one token id per row; see worker.runner.sampler.sample."""
    if not len(logits) or not _is_plain(rows):
        return sample(logits, rows)
    device = logits.device
    # One copy for all that the draws depend on; a float32 keeps its bits in the lower half.
    temperature = rows.temperature.view(np.int32).astype(np.int64)
    columns = (temperature, rows.seed.view(np.int64), rows.choice.view(np.int64), rows.position)
    packed = torch.from_numpy(np.stack(columns))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    bits, seed, choice, position = packed
    draws = Draws(bits.to(torch.int32).view(torch.float32), seed, choice, position)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
    sample_tokens(logits.contiguous(), draws, tokens)
    result: Int64Array = tokens.cpu().numpy()
    return result


def _is_plain(rows: SamplingRows) -> bool:
    """Tell whether no row asks for more than a temperature."""
    return not (
        rows.masked
        or rows.adjusted
        or rows.min_p.any()
        or rows.top_k.any()
        or (rows.top_p < 1.0).any()
    )

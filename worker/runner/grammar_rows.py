"""Lays the grammars of running requests on the logits of a step.

Rows without a grammar are left alone. It decides nothing: the masks are engine/grammar's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.grammar import GrammarError
from engine.grammar_table import GrammarTable


def grammar_masks(
    table: GrammarTable, request_ids: Sequence[str]
) -> tuple[dict[int, bytes], dict[str, str]]:
    """Return masks by row, one row for each request, and why some requests cannot go on."""
    masks: dict[int, bytes] = {}
    errors: dict[str, str] = {}
    for row, request_id in enumerate(request_ids):
        if request_id in table:
            try:
                masks[row] = table.mask(request_id)
            except GrammarError as error:
                errors[request_id] = f"grammar: {error}"
    return masks, errors


def accept_sampled(table: GrammarTable, sampled: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Tell the grammars what was sampled; return why some requests cannot go on by it."""
    errors: dict[str, str] = {}
    for request_id, token_ids in sampled.items():
        try:
            table.accept(request_id, token_ids)
        except GrammarError as error:
            errors[request_id] = f"grammar: {error}"
    return errors


def ruled(logits: torch.Tensor, masks: Mapping[int, bytes]) -> torch.Tensor:
    """Return the logits [rows, vocab_size] with what the masks exclude at -inf.

    The given ones are unchanged. Bits beyond the vocabulary count for nothing.
    """
    if not masks:
        return logits
    packed = np.frombuffer(b"".join(masks.values()), np.uint8).reshape(len(masks), -1)
    bits = np.unpackbits(~packed, axis=1, count=logits.shape[-1], bitorder="little")
    excluded = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    nothing = torch.tensor(-torch.inf, device=logits.device)
    if len(masks) == len(logits):
        return torch.where(excluded, nothing, logits)
    rows = torch.tensor(list(masks), device=logits.device)
    logits = logits.clone()
    logits[rows] = torch.where(excluded, nothing, logits[rows])
    return logits

"""Log probabilities of tokens, from the logits as the model gave them.

Before any adjustment, temperature or mask. It knows no requests and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.frontend.logprobs import TokenLogprobs

_ROWS_AT_A_TIME = 64


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return for each row its token's log probability and rank, and the `num_top[row]` likeliest.

    logits [rows, vocab_size] float32. Temporary memory is that of a few rows at a time.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        found += _some(logits[part], tokens[part], num_top[part])
    return found


def _some(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, index)
    ranks = (logits >= chosen).sum(dim=-1)
    best, best_tokens = logits.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    rows = zip(
        tokens,
        (chosen - total).squeeze(-1).tolist(),
        ranks.tolist(),
        best_tokens.tolist(),
        (best - total).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, ids, values, count in rows
    ]

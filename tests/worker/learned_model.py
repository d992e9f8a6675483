"""Small models that know texts by heart, so that nearly everywhere one token is best by far.

The layers are random, as in model_fixtures. The head has learned: it is the least-squares answer to
which token follows each of the model's own hidden states in float32. The texts are random as well:
the last token does not tell the next, so what is best depends on the layers too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    load_reference,
    random_prompts,
    rewrite_weights,
    store_in_bfloat16,
    write_tiny_model,
)

NUM_TOKENS = 150
"""Of each text that a model is asked about; one more is what comes after them."""

TEXTS = random_prompts(10, lengths=[NUM_TOKENS + 1], vocab_size=VOCAB_SIZE)

_WIDTHS: dict[str, object] = {"hidden_size": 192, "head_dim": 32, "tie_word_embeddings": False}
"""Hidden states that are wide enough to remember `TEXTS`, and whole vectors on every CPU."""

_LOGIT_SPREAD = 3.0
_RIDGE = 1e-6


def write_learned_model(folder: Path, *, family: str, **overrides: object) -> Path:
    """Write a model in bfloat16 that continues `TEXTS` as they go on; returns the folder."""
    write_tiny_model(folder, family=family, **{**overrides, **_WIDTHS})
    store_in_bfloat16(folder)
    with torch.inference_mode():
        layers = load_reference(folder).get_submodule("model")
        texts = torch.tensor(TEXTS)
        hidden = layers(texts[:, :-1]).last_hidden_state.flatten(0, 1).double()
    head = _least_squares(hidden, F.one_hot(texts[:, 1:].flatten(), VOCAB_SIZE).double())
    spread = (hidden @ head.T).std()
    rewrite_weights(folder, "lm_head.weight", (head * (_LOGIT_SPREAD / spread)).bfloat16())
    return folder


def _least_squares(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return W such that inputs @ W.T is nearest to targets; W [targets, inputs]."""
    square = inputs.T @ inputs
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    answer: torch.Tensor = torch.linalg.solve(square + ridge, inputs.T @ targets)
    return answer.T

"""Changes logits before a token is chosen: what is allowed, banned, biased or penalised.

Only rows that ask for it are touched, and of those only the tokens concerned, all rows at once.
It knows no temperature and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from worker.runner.request_state import Int32Array, Int64Array
from worker.runner.sampling_state import AdjustedRow, SamplingRows


def adjust(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logits [rows, vocab_size] as the requests want them; the given are unchanged.

    In vLLM's order: allowed tokens, bad words, stop tokens before min_tokens, bias, penalties.
    A ban that would leave a row no token at all is lifted: where a grammar and the allowed tokens
    exclude each other the grammar holds, and the last allowed token is said although it is bad.
    """
    if not rows.masked and not rows.adjusted:
        return logits
    logits = logits.clone()
    _allow(logits, rows.adjusted)
    _ban(logits, rows)
    _add_bias(logits, rows.adjusted)
    _penalize(logits, rows.adjusted)
    return logits


class _Cells:
    """Some (row, token) pairs of the logits."""

    __slots__ = ("_lengths", "_rows", "_tokens")

    def __init__(self, pairs: Sequence[tuple[int, Int64Array]], device: torch.device) -> None:
        lengths = [len(tokens) for _, tokens in pairs]
        rows = np.repeat([row for row, _ in pairs], lengths)
        tokens = np.concatenate([tokens for _, tokens in pairs])
        self._lengths = lengths
        self._rows = torch.from_numpy(rows).to(device)
        self._tokens = torch.from_numpy(tokens).to(device)

    def read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[self._rows, self._tokens]

    def write(self, logits: torch.Tensor, values: torch.Tensor | float) -> None:
        logits[self._rows, self._tokens] = torch.as_tensor(values, device=logits.device)

    def each(self, values: Sequence[float]) -> torch.Tensor:
        """Repeat one value per pair of rows and tokens for each of its cells."""
        repeated = np.repeat(np.array(values, np.float32), self._lengths)
        return torch.from_numpy(repeated).to(self._rows.device)


def _allow(logits: torch.Tensor, rows: Sequence[AdjustedRow]) -> None:
    asking = [
        (each.row, each.adjustments.allowed) for each in rows if len(each.adjustments.allowed)
    ]
    if not asking:
        return
    index = torch.tensor([row for row, _ in asking], device=logits.device)
    cells, before = _Cells(asking, logits.device), logits[index]
    kept = cells.read(logits)
    logits[index] = -torch.inf
    cells.write(logits, kept)
    _lift(logits, index, before)


def _ban(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Rule out what completes a bad word, and stop tokens of rows below their min_tokens."""
    banned = [(row, tokens) for row, tokens in rows.masked.items() if len(tokens)]
    for each in rows.adjusted:
        if each.adjustments.bad_words:
            last = _completions(each.adjustments.bad_words, each.tokens[each.num_prompt :])
            banned.append((each.row, np.fromiter(last, np.int64)))
    if not banned:
        return
    index = torch.tensor([row for row, _ in banned], device=logits.device)
    before = logits[index]
    _Cells(banned, logits.device).write(logits, -torch.inf)
    _lift(logits, index, before)


def _lift(logits: torch.Tensor, index: torch.Tensor, before: torch.Tensor) -> None:
    """Put back the rows of `index` that have no token left."""
    empty = logits[index].amax(dim=-1) == -torch.inf
    if empty.any():
        logits[index[empty]] = before[empty]


def _completions(bad_words: Sequence[tuple[int, ...]], outputs: Int32Array) -> Iterator[int]:
    """Yield the tokens that would complete a bad word behind these outputs."""
    for *beginning, last in bad_words:
        start = len(outputs) - len(beginning)
        if start >= 0 and outputs[start:].tolist() == beginning:
            yield last


def _add_bias(logits: torch.Tensor, rows: Sequence[AdjustedRow]) -> None:
    asking = [each for each in rows if len(each.adjustments.bias_tokens)]
    if asking:
        pairs = [(each.row, each.adjustments.bias_tokens) for each in asking]
        bias = np.concatenate([each.adjustments.bias for each in asking])
        cells = _Cells(pairs, logits.device)
        cells.write(logits, cells.read(logits) + torch.from_numpy(bias).to(logits.device))


def _penalize(logits: torch.Tensor, rows: Sequence[AdjustedRow]) -> None:
    """Apply the repetition, then the frequency and presence penalties (as vLLM defines them).

    Repetition (Keskar et al. 2019, CTRL) divides positive and multiplies negative logits of every
    token of prompt and output; the other two, OpenAI's, count outputs alone.
    """
    vocab_size = logits.shape[-1]
    repeating = [each for each in rows if each.adjustments.repetition != 1.0]
    if repeating:
        seen = [(each.row, _distinct(each.tokens, vocab_size)) for each in repeating]
        cells = _Cells(seen, logits.device)
        factor = cells.each([each.adjustments.repetition for each in repeating])
        values = cells.read(logits)
        cells.write(logits, torch.where(values > 0, values / factor, values * factor))
    pairs, penalties = [], []
    for each in rows:
        wanted, outputs = each.adjustments, each.tokens[each.num_prompt :]
        if (wanted.frequency or wanted.presence) and len(outputs):
            tokens, counts = np.unique(outputs, return_counts=True)
            pairs.append((each.row, tokens.astype(np.int64)))
            penalties.append(wanted.frequency * counts + wanted.presence)
    if pairs:
        cells = _Cells(pairs, logits.device)
        penalty = torch.from_numpy(np.concatenate(penalties)).to(logits)
        cells.write(logits, cells.read(logits) - penalty)


def _distinct(tokens: Int32Array, vocab_size: int) -> Int64Array:
    """Return each token once, in order; faster than sorting a long text."""
    is_seen = np.zeros(vocab_size, np.bool_)
    is_seen[tokens] = True
    found: Int64Array = np.flatnonzero(is_seen)
    return found

"""Chooses the next tokens of the requests in a batch, and verifies drafts on the way.

One round per place: every request gets the token behind its last known one, exactly as without
drafts. Who has a draft in that place and got the very same token goes on to the next round, with
the logits that the model computed behind the draft. So penalties, grammars and draws see what they
would see one token at a time, and nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.frontend.logprobs import TokenLogprobs
from engine.grammar_table import GrammarTable
from worker.runner.grammar_rows import accept_sampled, grammar_masks, ruled
from worker.runner.logprobs import logprobs_of
from worker.runner.request_state import Int64Array, RequestTable
from worker.runner.row_scans import finite_rows
from worker.runner.sampler import Sampler
from worker.runner.sampling_state import SamplingTable
from worker.spec_decode.rejection import Guess, verified
from worker.spec_decode.speculation import Speculation


@dataclass(slots=True)
class Choices:
    """What came of a step: tokens, what they were likely, and who cannot go on, by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class TokenChooser:
    """Draws for the requests of a table, by their parameters and along their grammars."""

    def __init__(
        self,
        requests: RequestTable,
        sampling: SamplingTable,
        grammars: GrammarTable,
        sampler: Sampler,
        speculation: Speculation | None = None,
    ) -> None:
        self._requests = requests
        self._sampling = sampling
        self._grammars = grammars
        self._sampler = sampler
        self._speculation = speculation

    def choose(
        self,
        logits: torch.Tensor,
        request_ids: Sequence[str],
        first_rows: Int64Array,
        drafts: Mapping[str, Sequence[int]],
    ) -> Choices:
        """Append the next tokens to each request; progress is the caller's to note.

        logits [rows, vocab_size] float32: for each request a row behind its last known token and
        one behind each of its drafts; `first_rows` [requests] says where they begin.
        A request whose row is not usable gets an error; if that row stands behind a draft, the
        next step finds it again.
        """
        choices = Choices()
        going, place = np.arange(len(request_ids)), 0
        while len(going):
            ids = [request_ids[i] for i in going.tolist()]
            rows = first_rows[going] + place
            whole = len(rows) == len(logits)
            unusable = self._one_round(
                logits if whole else logits[torch.from_numpy(rows).to(logits.device)],
                ids,
                [drafts.get(each, ())[place : place + 1] for each in ids] if drafts else None,
                choices,
            )
            if place == 0:
                choices.errors |= unusable
            going = np.array(
                [
                    i
                    for i, request_id in zip(going, ids, strict=True)
                    if request_id not in unusable
                    and request_id not in choices.errors
                    and place < len(tokens := drafts.get(request_id, ()))
                    and choices.token_ids[request_id][place] == tokens[place]
                ],
                np.int64,
            )
            place += 1
        return choices

    def _one_round(
        self,
        logits: torch.Tensor,
        request_ids: Sequence[str],
        drafts: Sequence[Sequence[int]] | None,
        choices: Choices,
    ) -> dict[str, str]:
        """Choose one token per row, except in those returned with the reason why they cannot be.

        `drafts`: what is guessed for each row, at most one token; None without any guess.
        """
        slots = self._requests.slots(request_ids)
        num_outputs = self._requests.num_tokens[slots] - self._requests.num_prompt_tokens[slots]
        masks, unusable = grammar_masks(self._grammars, request_ids)
        unusable |= {
            request_ids[int(i)]: f"the logits of output token {num_outputs[i]} are not finite"
            for i in np.flatnonzero(~finite_rows(logits))
        }
        constrained = ruled(logits, masks)
        good = np.array([i for i, each in enumerate(request_ids) if each not in unusable], np.int64)
        slots = slots[good]
        if len(good) < len(request_ids):
            index = torch.from_numpy(good).to(logits.device)
            logits, constrained = logits[index], constrained[index]
        rows = self._sampling.rows(slots, num_outputs[good])
        chosen: list[int] = self._sampler(constrained, rows).tolist()
        if drafts is not None and self._speculation is not None:
            guesses = self._free_guesses([request_ids[i] for i in good], [drafts[i] for i in good])
            for row, token in verified(constrained, rows, guesses):
                chosen[row] = token
        sampled: dict[str, list[int]] = {}
        for i, slot, token in zip(good, slots, chosen, strict=True):
            self._requests.append(slot, token)
            sampled[request_ids[int(i)]] = [token]
        choices.errors |= accept_sampled(self._grammars, sampled)
        self._note_logprobs(logits, slots, sampled, choices)
        for request_id, tokens in sampled.items():
            choices.token_ids.setdefault(request_id, []).extend(tokens)
        return unusable

    def _free_guesses(
        self, request_ids: Sequence[str], drafts: Sequence[Sequence[int]]
    ) -> list[Guess]:
        """List the guesses to be verified by what they were drawn from, not by equality."""
        assert self._speculation is not None
        found = []
        for row, (request_id, tokens) in enumerate(zip(request_ids, drafts, strict=True)):
            proposal = self._speculation.distribution(request_id) if tokens else None
            if proposal is not None:
                slot = self._requests.slot(request_id)
                place = int(self._requests.num_tokens[slot] - self._requests.num_computed[slot])
                found.append(Guess(row, tokens[0], proposal[place]))
        return found

    def _note_logprobs(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        sampled: Mapping[str, Sequence[int]],
        choices: Choices,
    ) -> None:
        """Look up what requests asked for; `logits` are the model's own, a row per sampled."""
        asking = [
            (row, request_id, sampled[request_id][0], num_top)
            for row, (request_id, num_top) in enumerate(
                zip(sampled, self._sampling.num_logprobs(slots), strict=True)
            )
            if num_top is not None
        ]
        if not asking:
            return
        rows, request_ids, tokens, num_top = zip(*asking, strict=True)
        entries = logprobs_of(logits[torch.tensor(rows)], tokens, num_top)
        for request_id, entry in zip(request_ids, entries, strict=True):
            choices.logprobs.setdefault(request_id, []).append(entry)

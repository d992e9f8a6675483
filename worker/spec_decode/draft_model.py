"""Guesses by a small model with the same tokens, which runs ahead of the large one.

It has a KV cache of its own, apart from the scheduler's blocks: a request is caught up with when it
is guessed for, and forgotten when it leaves. So it follows preemptions, hits and resyncs without
knowing of them. What it guesses is drawn as the request itself draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.frontend.sampling_params import SamplingParams
from engine.spec_decode.proposer import DraftContext
from worker.cpu.attention import AttentionPlan
from worker.model.causal_lm import CausalLM
from worker.runner.block_memory import BlockMemory
from worker.runner.request_state import Int64Array
from worker.runner.sampler import GREEDY_BELOW, sample, tempered
from worker.runner.sampling_state import SamplingRows

_CATCH_UP_TOKENS = 256
"""Of one request's text, so much is computed per step; it is guessed for when all is."""

_MASK64 = (1 << 64) - 1
_OWN_DRAWS = 0xD1B54A32D192ED03
"""Sets the draws of guesses apart from those that verify them."""


@dataclass(slots=True)
class _Followed:
    """A request that the model follows: the tokens whose KV stands in `block_ids`."""

    token_ids: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    block_ids: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Runs `model` over the texts of requests, in `num_blocks` blocks of its own.

    A request for which there are no blocks gets no guess.
    """

    def __init__(self, model: CausalLM, *, num_blocks: int, block_size: int) -> None:
        config = model.config
        self._model = model
        self._block_size = block_size
        self._memory = BlockMemory(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_shape=(block_size, config.num_kv_heads, config.head_dim),
            dtype=model.dtype,
        )
        self._free = list(reversed(range(1, num_blocks)))
        self._followed: dict[str, _Followed] = {}
        self._proposals: dict[str, torch.Tensor] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        """Return what the model says next, for requests that it has caught up with."""
        ready = [context for context in contexts if self._make_room(context)]
        if not ready:
            return {}
        texts = [np.asarray(context.token_ids, np.int64) for context in ready]
        logits = self._catch_up(ready, texts)
        going = [i for i, text in enumerate(texts) if self._is_caught_up(ready[i], text)]
        contexts, texts = [ready[i] for i in going], [texts[i] for i in going]
        logits = logits[going]
        drafts: list[list[int]] = [[] for _ in contexts]
        laid: list[list[torch.Tensor]] = [[] for _ in contexts]
        place = 0
        while contexts_left := [i for i, c in enumerate(contexts) if place < c.max_drafts]:
            if place:
                logits = self._forward(
                    [contexts[i] for i in contexts_left],
                    [np.array(drafts[i][-1:], np.int64) for i in contexts_left],
                )
            else:
                logits = logits[contexts_left]
            rows = _sampling_rows([contexts[i] for i in contexts_left], place)
            for row, (i, token) in enumerate(
                zip(contexts_left, sample(logits, rows).tolist(), strict=True)
            ):
                drafts[i].append(token)
                if _is_free(contexts[i].sampling):
                    laid[i].append(_distribution(logits[row], rows, row))
            place += 1
        self._proposals |= {
            context.request_id: torch.stack(each)
            for context, each in zip(contexts, laid, strict=True)
            if each
        }
        return {c.request_id: tokens for c, tokens in zip(contexts, drafts, strict=True)}

    def distribution(self, request_id: str) -> torch.Tensor | None:
        """Return what the last guesses of a request were drawn from, [guesses, vocab_size].

        None when its guesses are verified by equality.
        """
        return self._proposals.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request's KV and guesses; unknown ids are ignored."""
        self._proposals.pop(request_id, None)
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._free.extend(followed.block_ids)

    def _make_room(self, context: DraftContext) -> bool:
        """Give a request blocks for its text and its guesses; False when there are none left."""
        self._proposals.pop(context.request_id, None)
        followed = self._followed.setdefault(context.request_id, _Followed())
        num_tokens = len(context.token_ids) + context.max_drafts
        if num_tokens > self._model.config.max_position:
            return False
        num_wanted = -(-num_tokens // self._block_size) - len(followed.block_ids)
        if num_wanted > len(self._free):
            return False
        followed.block_ids += [self._free.pop() for _ in range(num_wanted)]
        return True

    def _catch_up(
        self, contexts: Sequence[DraftContext], texts: Sequence[Int64Array]
    ) -> torch.Tensor:
        """Compute what the model has not seen, at least the last token; logits behind it."""
        chunks = []
        for context, text in zip(contexts, texts, strict=True):
            followed = self._followed[context.request_id]
            known = followed.token_ids[: len(text) - 1]
            differs = np.flatnonzero(known != text[: len(known)])
            followed.token_ids = known[: differs[0]] if len(differs) else known
            start = len(followed.token_ids)
            chunks.append(text[start : start + _CATCH_UP_TOKENS])
        return self._forward(contexts, chunks)

    def _is_caught_up(self, context: DraftContext, text: Int64Array) -> bool:
        return len(self._followed[context.request_id].token_ids) == len(text)

    def _forward(
        self, contexts: Sequence[DraftContext], chunks: Sequence[Int64Array]
    ) -> torch.Tensor:
        """Compute the next tokens of each request; return the logits behind the last of each."""
        followed = [self._followed[context.request_id] for context in contexts]
        counts = np.array([len(chunk) for chunk in chunks], np.int64)
        starts = np.array([len(each.token_ids) for each in followed], np.int64)
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        width = max(len(each.block_ids) for each in followed)
        tables = np.zeros((len(followed), width), np.int32)
        for row, each in enumerate(followed):
            tables[row, : len(each.block_ids)] = each.block_ids
        for each, chunk in zip(followed, chunks, strict=True):
            each.token_ids = np.concatenate((each.token_ids, chunk))
        return self._model.forward(
            torch.from_numpy(np.concatenate(chunks)),
            torch.from_numpy(positions),
            cache=self._memory.cache,
            plan=AttentionPlan(
                num_queries=counts,
                num_computed=starts,
                block_tables=tables,
                block_size=self._block_size,
            ),
            rows=torch.from_numpy(np.cumsum(counts) - 1),
        )


def _is_free(sampling: SamplingParams) -> bool:
    """Tell whether guesses are verified by their probabilities, not by equality with a draw."""
    return sampling.seed_is_free and sampling.temperature >= GREEDY_BELOW


def _distribution(logits: torch.Tensor, rows: SamplingRows, row: int) -> torch.Tensor:
    return tempered(logits[None], rows, np.array([row]))[0].softmax(dim=-1)


def _sampling_rows(contexts: Sequence[DraftContext], place: int) -> SamplingRows:
    """Draw as the requests do: with their own numbers, or with others where those must differ.

    The same number in two similar distributions mostly gives the same token.
    """
    wanted = [context.sampling for context in contexts]
    num_outputs = [len(each.token_ids) - each.num_prompt_tokens for each in contexts]
    return SamplingRows(
        temperature=np.array([each.temperature for each in wanted], np.float32),
        min_p=np.array([each.min_p for each in wanted], np.float32),
        top_k=np.array([each.top_k for each in wanted], np.int64),
        top_p=np.array([each.top_p for each in wanted], np.float64),
        seed=np.array([_seed(each) for each in wanted], np.uint64),
        choice=np.array([context.choice for context in contexts], np.uint64),
        position=np.array(num_outputs, np.int64) + place,
        masked={},
        adjusted=[],
    )


def _seed(sampling: SamplingParams) -> int:
    seed = sampling.seed or 0
    return (seed ^ _OWN_DRAWS if _is_free(sampling) else seed) & _MASK64

"""One request inside the engine core: its tokens and how far they are computed.

`num_computed_tokens` is the only progress bar: prefill, chunks, decode and resume are all "catch
up with the known tokens". It knows no blocks; those belong to the KV cache manager.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.frontend.logprobs import TokenLogprobs
from engine.messages import EngineRequest, FinishReason
from engine.stats import Counters
from kvindex.hashing import Adapter, HashChain, HashScheme


class RequestStatus(Enum):
    """Where a request stands; it moves WAITING -> RUNNING (-> PREEMPTED -> RUNNING) -> FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a live request.

    `max_num_tokens`: with so many tokens it ends, by its own limit or the model's.
    `arrival`: how many requests came before it. `token_ids`: prompt, then everything generated
    (resumed tokens included). `num_cached_tokens`: prompt tokens found in the cache at first
    admission, None before it. `awaited_hash`: the block hash that another running request is
    about to commit and this one waits for.
    `is_open`: more of the prompt is to come; `is_stalled`: nothing can be computed before it does.
    `num_placeholders`: steps in flight that sample for it, each one token for certain; with those
    it is computed ahead. `draft_token_ids`: guesses behind the last known token, to be verified
    or in flight; a request with both is planned again when they have returned.
    `prompt_logprobs`: those of the prompt tokens from the second on, as far as they are computed.
    `num_drafted`: guesses verified so far; `num_accepted` of them were right.
    `account`: where its tenant's share of the totals is counted.
    `num_bypassed`: requests that were admitted although this one, before them, did not fit.
    """

    source: EngineRequest
    arrival: int
    token_ids: list[int]
    num_prompt_tokens: int
    chain: HashChain
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    draft_token_ids: Sequence[int] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_bypassed: int = 0
    awaited_hash: bytes | None = None
    cached_reported: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_stalled: bool = False
    account: Counters = field(default_factory=Counters)
    max_num_tokens: int = field(init=False)
    request_id: str = field(init=False)
    is_open: bool = field(init=False)
    _stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Work out what every step needs."""
        self.request_id = self.source.request_id
        self.is_open = self.source.prompt_is_open
        sampling = self.source.sampling
        eos = () if sampling.ignore_eos else self.source.eos_token_ids
        self._stop_ids = frozenset(eos).union(sampling.stop_token_ids)
        self.limit_to(sys.maxsize)

    @classmethod
    def admit(cls, source: EngineRequest, scheme: HashScheme, *, arrival: int) -> Request:
        """Build a request and hash the full blocks of its known tokens."""
        tokens = [*source.prompt_token_ids, *source.resume_token_ids]
        lora = source.lora
        adapter = None if lora is None else Adapter(lora.name, lora.path)
        chain = HashChain(scheme, cache_salt=source.cache_salt, adapter=adapter)
        chain.extend(tokens)
        return cls(source, arrival, tokens, len(source.prompt_token_ids), chain)

    @property
    def was_admitted(self) -> bool:
        """Whether it has run before: first admission is behind it."""
        return self.num_cached_tokens is not None

    @property
    def lora_name(self) -> str | None:
        """The adapter that it runs with."""
        return None if self.source.lora is None else self.source.lora.name

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Known tokens and those that steps in flight sample for certain."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_left(self) -> int:
        """Tokens that can be computed now: the last one of an open prompt cannot yet."""
        return self.num_expected_tokens - self.num_computed_tokens - self.is_open

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the whole prompt must be computed, cached or not: what it scores is asked for."""
        if self.source.sampling.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take in what the tokens from `start` on predict; of what is known, nothing changes.

        After a preemption, the same tokens are computed once more.
        """
        assert start <= len(self.prompt_logprobs), "a part of the prompt was not computed"
        self.prompt_logprobs += entries[len(self.prompt_logprobs) - start :]

    def limit_to(self, max_model_len: int) -> None:
        """Bound the whole sequence by the model's limit."""
        limit = self.source.sampling.max_tokens
        longest = max_model_len if limit is None else self.num_prompt_tokens + limit
        self.max_num_tokens = min(max_model_len, longest)

    def extend_prompt(self, token_ids: list[int], *, is_last: bool) -> None:
        """Append to an open prompt, and close it with the last part."""
        assert self.is_open, f"the prompt of {self.request_id} is closed"
        self.token_ids.extend(token_ids)
        self.num_prompt_tokens += len(token_ids)
        self.chain.extend(self.token_ids)
        self.is_open = not is_last

    def append(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Add a generated token; tell whether it ends the request, and the stop token if one did.

        Stop tokens come before length. The sampler masks them until `min_tokens`; resumed outputs
        count as outputs.
        """
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if num_tokens // self.chain.block_size > len(self.chain.hashes):
            self.chain.extend(self.token_ids)
        if token_id in self._stop_ids:
            min_tokens = self.source.sampling.min_tokens
            if min_tokens == 0 or num_tokens - self.num_prompt_tokens > min_tokens:
                return "stop", token_id
        return ("length", None) if num_tokens >= self.max_num_tokens else (None, None)

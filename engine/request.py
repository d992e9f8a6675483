"""One request inside the engine core: its tokens and how far they are computed.

`num_computed_tokens` is the only progress bar: prefill, chunks, decode and resume are all "catch
up with the known tokens". It knows no blocks; those belong to the KV cache manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.messages import EngineRequest
from kvindex.hashing import HashChain, HashScheme


class RequestStatus(Enum):
    """Where a request stands; it moves WAITING -> RUNNING (-> PREEMPTED -> RUNNING) -> FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a live request.

    `arrival`: how many requests came before it. `token_ids`: prompt, then everything generated
    (resumed tokens included). `num_cached_tokens`: prompt tokens found in the cache at first
    admission, None before it. `awaited_hash`: the block hash that another running request is
    about to commit and this one waits for.
    `num_placeholders`: tokens that steps in flight will sample; with them it is computed ahead.
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
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_bypassed: int = 0
    awaited_hash: bytes | None = None
    cached_reported: bool = field(default=False)

    @classmethod
    def admit(cls, source: EngineRequest, scheme: HashScheme, *, arrival: int) -> Request:
        """Build a request and hash the full blocks of its known tokens."""
        tokens = [*source.prompt_token_ids, *source.resume_token_ids]
        chain = HashChain(scheme, cache_salt=source.cache_salt)
        chain.extend(tokens)
        return cls(source, arrival, tokens, len(source.prompt_token_ids), chain)

    @property
    def request_id(self) -> str:
        """The id that is unique among live requests."""
        return self.source.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Known tokens and those that steps in flight will sample."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Add a generated token and hash the block it may complete."""
        self.token_ids.append(token_id)
        self.chain.extend(self.token_ids)

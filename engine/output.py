"""The contract between scheduler and model runner: what a step computes, and what came of it.

A runner's state is a pure fold of these outputs. A preempted request comes back as a new one with
all its tokens, so a runner keeps nothing of what is not running.
"""

from __future__ import annotations

import msgspec

from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.sampling_params import SamplingParams
from engine.messages import LoRARequest
from engine.transfer import BlockCopy, BlockTransfer


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters (or re-enters) the running batch.

    `token_ids`: prompt and everything generated so far. `block_ids`: its whole block tables,
    one per cache group; block 0 stands where a group needs none.
    `num_computed_tokens`: how many leading tokens already have their KV in those blocks.
    `num_prompt_tokens` tells output positions from prompt positions (seeds, min_tokens).
    `eos_token_ids` are masked until `sampling.min_tokens` outputs exist. `lora`: the adapter that
    it runs with.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    choice: int = 0
    lora: LoRARequest | None = None


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Order of application: drop, add, extend, move blocks (in order), compute.

    `num_scheduled_tokens`: request id -> tokens to compute now (> 0), in batch order; the runner
    knows each request's progress, because it computed all of it. A request whose chunk reaches
    its last known token gets one token sampled; others get none. `step` counts the steps from 1,
    and none is left out.
    A request with drafts computes them too, behind its last known token: they are counted in its
    `num_scheduled_tokens`. It gets one token sampled, and one more behind each draft that equals
    the token sampled in its place; so far, and no further, its progress goes beyond that token.
    """

    step: int
    new_requests: list[NewRequestData]
    new_block_ids: dict[str, list[list[int]]]  # appended to running requests' tables, per group
    num_scheduled_tokens: dict[str, int]
    num_computed_tokens: dict[str, int]  # before this step, for cross-checking
    dropped_request_ids: list[str]  # finished, aborted or preempted since the last step
    new_prompt_ids: dict[str, list[int]] = {}  # what running requests' open prompts grew by
    transfers: list[BlockTransfer] = []
    num_blocks: int | None = None  # the pool's size from this step's computation on, if it changed
    draft_token_ids: dict[str, list[int]] = {}  # guesses behind the last known token, to verify
    resync: bool = False  # forget every request first: all that run are among the new ones

    @property
    def num_prefill_tokens(self) -> int:
        """Scheduled tokens of requests that have more than their last known one to compute."""
        drafts = self.draft_token_ids
        return sum(n for i, n in self.num_scheduled_tokens.items() if n > 1 and i not in drafts)

    @property
    def num_tier_moves(self) -> int:
        """Blocks that go to the host tier or come from it."""
        return sum(1 for move in self.transfers if not isinstance(move, BlockCopy))

    @property
    def total_scheduled_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner sampled: request id -> new tokens, only for requests that sampled.

    `errors`: request id -> why this request alone cannot go on (for example non-finite logits).
    `logprobs`: an entry for each sampled token of a request that asked; `prompt_logprobs`: of the
    prompt tokens that this step computed, for those who asked.
    `draft_token_ids`: what the runner guesses comes next, for requests that it has a guess for.
    `transfer_s`: seconds that the moves between pool and host tier took. `num_padding_tokens`:
    tokens computed for nobody, because the step was filled up to a shape that exists.
    """

    sampled_token_ids: dict[str, list[int]]
    errors: dict[str, str] = {}
    transfer_s: float = 0.0
    num_padding_tokens: int = 0
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    draft_token_ids: dict[str, list[int]] = {}

"""Settings of the scheduler and the block pool (section `engine`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme

_ROUNDING = 1e-9

QueuePolicy = Literal["fcfs", "priority", "fair"]
SpeculationMethod = Literal["none", "ngram", "draft", "medusa", "eagle"]


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How next tokens are guessed, to be verified several at a time; outputs do not change.

    `num_draft_tokens`: at most so many guesses per request and step. `min_ngram` and `max_ngram`
    bound the n-grams of method `ngram`. `model`: folder of the draft model, for method `draft`.
    `adaptive`: only as many guesses as pay by the measured cost; without it always all.
    """

    method: SpeculationMethod = "none"
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    min_ngram: Annotated[int, msgspec.Meta(ge=1)] = 2
    max_ngram: Annotated[int, msgspec.Meta(ge=1)] = 4
    model: str | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ConfigError(
                f"engine.speculation.min_ngram is {self.min_ngram}; expected at most max_ngram, "
                f"which is {self.max_ngram}"
            )
        if self.method == "draft" and self.model is None:
            raise ConfigError(
                "engine.speculation.model is missing; method draft needs the folder of a small "
                "model with the same tokens"
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine schedules and caches; sizes in tokens unless named otherwise.

    `max_model_len` 0 takes the model's own limit. `max_num_batched_tokens` bounds a step; so does
    `max_step_s` (seconds, 0 = off), by the prefill speed measured so far: aborts and newcomers
    wait for the running step.
    `async_depth`: steps scheduled ahead of the one that is being computed (0 to 2).
    `watermark` is the share of blocks kept free when a waiting request is admitted.
    `policy` orders admission (waiting_queue.py); `aging_arrivals` is its aging, 0 = none.
    `max_bypass`: so many requests may be admitted before one that does not fit yet.
    `max_prefill_share`: the part of a step that one prompt may take while others want it too.
    `max_preemptions`: a request preempted so often comes back only with all its blocks reserved.
    `num_host_blocks`: blocks of host memory for what the pool evicts, 0 = none.
    `kv_shares`: tenant -> part of the pool that its cached blocks keep when others want more.
    `protected_share`: the part of the free blocks that go last because a request has hit them
    before, 0 = plain least-recently-used order.
    `slab_blocks`: the pool shrinks and grows by so many blocks.
    `speculation`: guessing of tokens ahead.
    """

    block_size: int = 16
    hash_seed: str = "vllm-none-hash"
    enable_prefix_caching: bool = True
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_s: float = 0.5
    async_depth: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    max_num_queued_reqs: int = 4096
    watermark: float = 0.01
    policy: QueuePolicy = "fair"
    aging_arrivals: int = 64
    max_bypass: int = 16
    max_prefill_share: float = 0.5
    max_preemptions: int = 3
    num_host_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_shares: dict[str, float] = {}
    protected_share: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    slab_blocks: Annotated[int, msgspec.Meta(ge=2)] = 64
    check_integrity: bool = False
    speculation: SpeculationConfig = SpeculationConfig()

    def __post_init__(self) -> None:
        for tenant, share in self.kv_shares.items():
            if not 0 < share <= 1:
                raise ConfigError(
                    f"engine.kv_shares.{tenant} is {share}; expected more than 0 and at most 1"
                )
        total = sum(self.kv_shares.values())
        if total > 1 + _ROUNDING:
            raise ConfigError(f"engine.kv_shares add up to {total:g}; expected 1 at most")

    @property
    def hash_scheme(self) -> HashScheme:
        """The scheme of this engine's hash chain."""
        return HashScheme(seed=self.hash_seed, block_size=self.block_size)

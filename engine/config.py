"""Settings of the scheduler and the block pool (section `engine`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme

_ROUNDING = 1e-9

QueuePolicy = Literal["fcfs", "priority", "fair"]


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
    `slab_blocks`: the pool shrinks and grows by so many blocks.
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
    slab_blocks: Annotated[int, msgspec.Meta(ge=2)] = 64
    check_integrity: bool = False

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

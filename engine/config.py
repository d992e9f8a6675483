"""Settings of the scheduler and the block pool (section `engine`)."""

from __future__ import annotations

import msgspec

from kvindex.hashing import HashScheme


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine schedules and caches; sizes in tokens unless named otherwise.

    `max_model_len` 0 takes the model's own limit. `max_num_batched_tokens` bounds a step; so does
    `max_step_s` (seconds, 0 = off), by the prefill speed measured so far: aborts and newcomers
    wait for the running step.
    `watermark` is the share of blocks kept free when a waiting request is admitted.
    """

    block_size: int = 16
    hash_seed: str = "vllm-none-hash"
    enable_prefix_caching: bool = True
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_s: float = 0.5
    max_num_queued_reqs: int = 4096
    watermark: float = 0.01
    check_integrity: bool = False

    @property
    def hash_scheme(self) -> HashScheme:
        """The scheme of this engine's hash chain."""
        return HashScheme(seed=self.hash_seed, block_size=self.block_size)

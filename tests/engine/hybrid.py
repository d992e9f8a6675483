"""Builders for tests with several cache groups: named group sets, cores over them, references."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_groups.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVGroupSpec,
    LinearState,
    SlidingWindow,
)
from engine.messages import EngineRequest
from engine.scripted_executor import ScriptedExecutor
from engine.spec_decode.proposer import Proposer
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import BLOCK_SIZE, run

GROUPS: dict[str, tuple[KVGroupSpec, ...]] = {
    "full": (FullAttention(),),
    "full+window": (FullAttention(), SlidingWindow(window=6)),
    "full+coarse window": (FullAttention(), SlidingWindow(window=6, block_size=16)),
    "coarse full+window": (FullAttention(block_size=16), SlidingWindow(window=7)),
    "full+chunk": (FullAttention(), ChunkedLocal(chunk=8, block_size=8)),
    "full+uneven chunk": (FullAttention(block_size=8), ChunkedLocal(chunk=6)),
    "full+state": (FullAttention(), LinearState(block_size=8)),
    "full+window+state": (
        FullAttention(block_size=16),
        SlidingWindow(window=5),
        LinearState(block_size=8),
    ),
    "two windows": (SlidingWindow(window=3), SlidingWindow(window=17, block_size=8)),
    "state alone": (LinearState(),),
    "full+cross": (FullAttention(), CrossAttention(num_tokens=10)),
    "full+non-causal": (FullAttention(), FullAttention(block_size=8, causal=False)),
    "full+drafter": (FullAttention(block_size=8), FullAttention(drafter=True)),
}


def make_hybrid_core(
    groups: tuple[KVGroupSpec, ...],
    *,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 128,
    budget: int = 64,
    caching: bool = True,
    proposer: Proposer | None = None,
    **settings: object,
) -> EngineCore:
    """Build a core over a model with these cache groups; `block_size` is the hash unit."""
    plain = {
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 16,
        "watermark": 0.0,
        "enable_prefix_caching": caching,
        "max_prefill_share": 1.0,
        "max_step_s": 0.0,
        "check_integrity": True,
    }
    config = msgspec.convert({**plain, **settings}, EngineConfig)
    executor = ScriptedExecutor(
        num_blocks=num_blocks, block_size=block_size, kv_groups=groups, proposer=proposer
    )
    return EngineCore(config, executor, VirtualClock())


def alone_with(groups: tuple[KVGroupSpec, ...], request: EngineRequest) -> list[int]:
    """Return the tokens of a request that runs alone, uncached, unpressed: the reference."""
    core = make_hybrid_core(groups, num_blocks=256, budget=1024, caching=False)
    return run(core, request).tokens[request.request_id]

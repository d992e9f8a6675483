"""Builders for engine tests: a core over the scripted executor, requests, and runs of them."""

from __future__ import annotations

import random

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineOutput, EngineRequest
from engine.scripted_executor import ScriptedExecutor
from engine.spec_decode.proposer import Proposer
from kvindex.foundation.clock import VirtualClock

BLOCK_SIZE = 4


def make_core(
    *,
    num_blocks: int = 64,
    budget: int = 64,
    max_num_seqs: int = 16,
    watermark: float = 0.0,
    caching: bool = True,
    max_model_len: int = 0,
    check_integrity: bool = True,
    proposer: Proposer | None = None,
    num_draft_tokens: int = 4,
    **settings: object,
) -> EngineCore:
    """Build a core whose invariants are checked after every step, unless told otherwise."""
    plain = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": budget,
        "max_num_seqs": max_num_seqs,
        "watermark": watermark,
        "enable_prefix_caching": caching,
        "max_model_len": max_model_len,
        "max_step_s": 0.0,
        "max_prefill_share": 1.0,
        "check_integrity": check_integrity,
    }
    config = msgspec.convert({**plain, **settings}, EngineConfig)
    executor = ScriptedExecutor(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        proposer=proposer,
        num_draft_tokens=num_draft_tokens,
    )
    return EngineCore(config, executor, VirtualClock())


def make_request(
    request_id: str,
    prompt: list[int] | range,
    *,
    max_tokens: int = 4,
    salt: str | None = None,
    resume: list[int] | None = None,
    eos: tuple[int, ...] = (),
    priority: int = 0,
    tenant: str | None = None,
    weight: float = 1.0,
    **sampling: object,
) -> EngineRequest:
    """Build a greedy request unless `sampling` says otherwise."""
    params = msgspec.convert(
        {"temperature": 0.0, "max_tokens": max_tokens, **sampling}, SamplingParams
    )
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=params,
        cache_salt=salt,
        resume_token_ids=resume or [],
        eos_token_ids=eos,
        priority=priority,
        tenant=tenant,
        weight=weight,
    )


def pressing_requests(count: int, *, seed: int) -> list[EngineRequest]:
    """Build requests of three prefixes, of any length, urgency and end; a small pool lacks room."""
    rng = random.Random(seed)
    return [
        make_request(
            f"r{i}",
            [*((30 * (i % 3) + j) % 256 for j in range(rng.randrange(1, 14))), rng.randrange(256)],
            max_tokens=rng.randrange(8, 24),
            priority=rng.randrange(3),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            eos=(1, 2, 3),
        )
        for i in range(count)
    ]


class Run:
    """Collects the outputs of a core while it is stepped."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.num_steps = 0

    def step(self) -> list[EngineOutput]:
        """Run one step and keep its outputs."""
        outputs = self.core.step()
        self.num_steps += 1
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.num_cached_tokens is not None:
                self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason is not None:
                self.finish[output.request_id] = output.finish_reason
        return outputs

    def to_end(self, *, limit: int = 10_000) -> Run:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.core.has_work:
                return self
            self.step()
        raise AssertionError(f"still working after {limit} steps")


def run(core: EngineCore, *requests: EngineRequest) -> Run:
    """Add all requests at once and run them to their end."""
    for request in requests:
        core.add(request)
    return Run(core).to_end()


def alone(request: EngineRequest) -> list[int]:
    """Return the tokens of a request that runs alone, uncached, unpressed: the reference."""
    core = make_core(num_blocks=256, budget=1024, caching=False, check_integrity=False)
    return run(core, request).tokens[request.request_id]

"""An executor without a model: real block tables, deterministic tokens, a stated step cost.

The next token is a hash of the KV contents that a model would read through the block table, and
each slot's content depends on the contents before it: a wrong, stale or unwritten block changes
the output, as it would with a real model. Used by tests, the simulator and fleets without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.executor import ExecutorInfo
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput

_SLOT_BYTES = 8


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a step takes: base, plus per prefill token, plus per decoding request."""

    base_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_decode_s: float = 0.0

    def of(self, step: SchedulerOutput) -> float:
        """Return the cost of one step."""
        num_prefill = sum(n for n in step.num_scheduled_tokens.values() if n > 1)
        num_decode = sum(1 for n in step.num_scheduled_tokens.values() if n == 1)
        return self.base_s + num_prefill * self.per_prefill_token_s + num_decode * self.per_decode_s


@dataclass(slots=True)
class _Row:
    """What the runner remembers of a running request."""

    source: NewRequestData
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class ScriptedExecutor:
    """Deterministic tokens in [first_token, vocab_size) from the KV contents.

    Greedy requests draw from the contents alone, others from (contents, seed, choice, position).
    `sleep` is called with the cost of each step; None costs nothing.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 256,
        max_model_len: int = 1 << 20,
        first_token: int = 0,
        cost: StepCost | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            execution_digest=f"scripted-{vocab_size}-{first_token}",
        )
        self.cost = cost or StepCost()
        self._sleep = sleep
        self._block_size = block_size
        self._first_token = first_token
        self._memory = [bytearray(block_size * _SLOT_BYTES) for _ in range(num_blocks)]
        self._rows: dict[str, _Row] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Write the scheduled slots, then sample for requests that reached their last token."""
        for request_id in step.dropped_request_ids:
            self._rows.pop(request_id, None)
        for new in step.new_requests:
            assert new.request_id not in self._rows, f"{new.request_id} is new but known"
            self._rows[new.request_id] = _Row(
                new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens
            )
        for request_id, block_ids in step.new_block_ids.items():
            self._rows[request_id].block_ids.extend(block_ids)
        sampled: dict[str, list[int]] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            row = self._rows[request_id]
            assert row.num_computed_tokens == step.num_computed_tokens[request_id]
            self._write(row, count)
            if row.num_computed_tokens == len(row.token_ids):
                token_id = self._sample(row)
                row.token_ids.append(token_id)
                sampled[request_id] = [token_id]
        if self._sleep is not None:
            self._sleep(self.cost.of(step))
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def close(self) -> None:
        """Forget every request."""
        self._rows.clear()

    def _write(self, row: _Row, count: int) -> None:
        position = row.num_computed_tokens
        previous = self._slot(row, position - 1) if position else b""
        for token_id in row.token_ids[position : position + count]:
            content = hashlib.blake2b(
                previous + token_id.to_bytes(4, "big"), digest_size=_SLOT_BYTES
            ).digest()
            block = self._memory[row.block_ids[position // self._block_size]]
            offset = position % self._block_size * _SLOT_BYTES
            block[offset : offset + _SLOT_BYTES] = content
            previous = content
            position += 1
        row.num_computed_tokens = position

    def _slot(self, row: _Row, position: int) -> bytes:
        block = self._memory[row.block_ids[position // self._block_size]]
        offset = position % self._block_size * _SLOT_BYTES
        return bytes(block[offset : offset + _SLOT_BYTES])

    def _sample(self, row: _Row) -> int:
        """Hash all contents up to the last token, read through the block table."""
        num_full, rest = divmod(row.num_computed_tokens, self._block_size)
        digest = hashlib.blake2b(digest_size=_SLOT_BYTES)
        for block_id in row.block_ids[:num_full]:
            digest.update(self._memory[block_id])
        if rest:
            digest.update(self._memory[row.block_ids[num_full]][: rest * _SLOT_BYTES])
        sampling = row.source.sampling
        position = len(row.token_ids) - row.source.num_prompt_tokens
        if sampling.temperature > 0:
            digest.update(f"{sampling.seed}/{row.source.choice}/{position}".encode())
        span = self.info.vocab_size - self._first_token
        token_id = self._first_token + int.from_bytes(digest.digest(), "big") % span
        masked = {*row.source.eos_token_ids, *sampling.stop_token_ids}
        while position < sampling.min_tokens and token_id in masked:
            token_id = self._first_token + (token_id - self._first_token + 1) % span
        return token_id

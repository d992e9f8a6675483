"""Runs the scheduler's steps on one model with a paged KV cache.

execute = fold the step into the request table, lay out one batch, forward, sample. It trusts the
scheduler's blocks and budget and knows nothing of queues, prefixes or hashes.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from engine.executor import OutOfDeviceMemoryError
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.runner_state import digest_of
from worker.model.llama import LlamaModel
from worker.runner.block_memory import BlockMemory
from worker.runner.input_batch import InputBatch, build_input_batch
from worker.runner.request_state import RequestTable
from worker.runner.sampler import sample
from worker.runner.sampling_state import SamplingTable


class ModelRunner:
    """A model, its KV cache and the state of the requests that run on it.

    Owns the cache: block ids in steps are below `num_blocks`, and block 0 belongs to nobody. So
    it does the host tier, of `num_host_blocks` blocks.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
    ) -> None:
        config = model.config
        self._model = model
        self._block_size = block_size
        self._memory = BlockMemory(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_shape=(block_size, config.num_kv_heads, config.head_dim),
            dtype=model.dtype,
        )
        self._is_out_of_memory = False
        self._requests = RequestTable(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size
        )
        self._sampling = SamplingTable(max_num_seqs=max_num_seqs, vocab_size=config.vocab_size)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; a request whose logits are not finite gets an error, others go on.

        Raises OutOfDeviceMemoryError as `Executor.collect` describes it.
        """
        self._fold(step)
        transfer_s = self._memory.move(step.transfers)
        if step.num_blocks is not None:
            self._memory.resize(step.num_blocks)
        if step.resync:
            self._is_out_of_memory = False
        if self._is_out_of_memory:
            raise OutOfDeviceMemoryError("a step before this one ran out of memory")
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={}, transfer_s=transfer_s)
        try:
            output = self._compute(step)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._is_out_of_memory = True
            raise OutOfDeviceMemoryError(str(error)) from error
        return msgspec.structs.replace(output, transfer_s=transfer_s)

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(step.num_scheduled_tokens)
        batch = self._input_batch(step, request_ids)
        logits = self._model.forward(
            batch.token_ids,
            batch.positions,
            cache=self._memory.cache,
            plan=batch.plan,
            rows=batch.logits_rows,
        )
        self._requests.num_computed[batch.slots] += batch.num_scheduled
        return self._sample(logits, batch, [request_ids[i] for i in batch.sampling])

    def state_digest(self) -> bytes:
        """Return the digest of all that is known of requests, as RunnerState.digest does."""
        return digest_of(self._requests.states())

    def _fold(self, step: SchedulerOutput) -> None:
        """Apply a step to the request table: forget, drop, add, extend."""
        if step.resync:
            self._requests.clear()
        for request_id in step.dropped_request_ids:
            self._requests.drop(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, block_ids in step.new_block_ids.items():
            self._requests.extend(request_id, block_ids)
        for request_id, token_ids in step.new_prompt_ids.items():
            self._requests.extend_prompt(request_id, token_ids)

    def _add(self, request: NewRequestData) -> None:
        self._sampling.set(self._requests.add(request), request)

    def _input_batch(self, step: SchedulerOutput, request_ids: list[str]) -> InputBatch:
        slots = self._requests.slots(request_ids)
        for request_id, computed in zip(
            request_ids, self._requests.num_computed[slots], strict=True
        ):
            expected = step.num_computed_tokens.get(request_id, computed)
            assert computed == expected, (
                f"step {step.step}: {request_id} has {computed} tokens computed here, "
                f"{expected} in the scheduler"
            )
        num_scheduled = np.fromiter(step.num_scheduled_tokens.values(), np.int64)
        return build_input_batch(self._requests, slots, num_scheduled, block_size=self._block_size)

    def _sample(
        self, logits: torch.Tensor, batch: InputBatch, request_ids: list[str]
    ) -> ModelRunnerOutput:
        """Sample the rows whose logits are finite and append their tokens."""
        slots = batch.slots[batch.sampling]
        num_outputs = self._requests.num_tokens[slots] - self._requests.num_prompt_tokens[slots]
        finite = logits.isfinite().all(dim=-1).numpy()
        good = np.flatnonzero(finite)
        errors = {
            request_ids[i]: f"the logits of output token {num_outputs[i]} are not finite"
            for i in np.flatnonzero(~finite)
        }
        rows = self._sampling.rows(slots[good], num_outputs[good])
        tokens = sample(
            logits if len(good) == len(finite) else logits[torch.from_numpy(good)], rows
        )
        sampled: dict[str, list[int]] = {}
        for i, token in zip(good, tokens.tolist(), strict=True):
            self._requests.append(slots[i], token)
            sampled[request_ids[i]] = [token]
        return ModelRunnerOutput(sampled_token_ids=sampled, errors=errors)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch raised for want of memory; its CPU allocator has no class for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

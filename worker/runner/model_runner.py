"""Runs the scheduler's steps on one model with a paged KV cache.

execute = fold the step into the request table, lay out one batch, forward, sample. It trusts the
scheduler's blocks and budget and knows nothing of queues, prefixes or hashes.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import torch

from engine.executor import OutOfDeviceMemoryError
from engine.grammar import GrammarBackend
from engine.grammar_table import GrammarTable
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.runner_state import digest_of
from worker.model.causal_lm import CausalLM
from worker.model.kv_layout import cache_layout
from worker.runner.adapters import AdapterTable
from worker.runner.block_memory import BlockMemory
from worker.runner.choice import TokenChooser
from worker.runner.input_batch import InputBatch, build_input_batch
from worker.runner.prompt_rows import prompt_rows
from worker.runner.request_state import RequestTable
from worker.runner.sampler import Sampler, sample
from worker.runner.sampling_state import SamplingTable
from worker.spec_decode.speculation import Speculation


class ModelRunner:
    """A model, its KV cache and the state of the requests that run on it.

    Owns the cache: block ids in steps are below `num_blocks`, and block 0 belongs to nobody. So
    it does the host tier, of `num_host_blocks` blocks. Without `grammars`, requests that ask for
    one fail; without `speculation`, no token is guessed. A model on another device comes with the
    `memory` there and with its `sampler`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        grammars: GrammarBackend | None = None,
        memory: BlockMemory | None = None,
        sampler: Sampler = sample,
        speculation: Speculation | None = None,
    ) -> None:
        config = model.config
        layout = cache_layout(config, block_size=block_size, itemsize=model.dtype.itemsize)
        tokens_per_block = layout.attention_block_size or block_size
        self._model = model
        self._block_size = block_size
        self._memory = memory or BlockMemory(
            num_layers=layout.num_rows,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_shape=(tokens_per_block, config.num_kv_heads, config.head_dim),
            dtype=model.dtype,
        )
        self._is_out_of_memory = False
        self._speculation = speculation
        self._requests = RequestTable(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_groups=len(layout.windows),
        )
        self._sampling = SamplingTable(self._requests, vocab_size=config.vocab_size)
        self._grammars = GrammarTable(grammars, vocab_size=config.vocab_size)
        self._chooser = TokenChooser(
            self._requests, self._sampling, self._grammars, sampler, speculation
        )
        self._adapters = AdapterTable(
            config, dtype=model.dtype, device=self._memory.cache.keys.device
        )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; a request whose logits are not finite gets an error, others go on.

        Raises OutOfDeviceMemoryError as `Executor.collect` describes it.
        """
        self._fold(step)
        failures = self._adapters.take_failures()
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
        errors = {**output.errors, **failures}
        return msgspec.structs.replace(output, transfer_s=transfer_s, errors=errors)

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        started = time.perf_counter()
        request_ids = list(step.num_scheduled_tokens)
        batch = self._input_batch(step, request_ids)
        prompt = prompt_rows(
            self._requests,
            batch.slots,
            batch.num_scheduled,
            self._sampling.num_prompt_logprobs(batch.slots),
        )
        rows = batch.logits_rows if prompt is None else torch.cat((batch.logits_rows, prompt.rows))
        logits = self._model.forward(
            batch.token_ids,
            batch.positions,
            cache=self._memory.cache,
            plan=batch.plan,
            rows=rows,
            adapters=self._adapters.of_batch(batch.slots, batch.num_scheduled),
        )
        self._requests.num_computed[batch.slots] += batch.num_scheduled - batch.num_drafts
        output = self._sample(
            logits[: len(batch.logits_rows)],
            batch,
            [request_ids[i] for i in batch.sampling],
            step.draft_token_ids,
        )
        if prompt is not None:
            prompt_logprobs = prompt.logprobs(logits[len(batch.logits_rows) :], request_ids)
            output = msgspec.structs.replace(output, prompt_logprobs=prompt_logprobs)
        if self._speculation is None:
            return output
        self._speculation.observe(step, output, time.perf_counter() - started)
        self._speculation.see(request_ids, batch, self._requests)
        return msgspec.structs.replace(output, draft_token_ids=self._drafts(output))

    def state_digest(self) -> bytes:
        """Return the digest of all that is known of requests, as RunnerState.digest does."""
        return digest_of(self._requests.states())

    def _fold(self, step: SchedulerOutput) -> None:
        """Apply a step to the request table: forget, drop, add, extend."""
        if step.resync:
            self._requests.clear()
            self._grammars.clear()
            if self._speculation is not None:
                self._speculation.clear()
        for request_id in step.dropped_request_ids:
            self._requests.drop(request_id)
            self._grammars.drop(request_id)
            if self._speculation is not None:
                self._speculation.drop(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, block_ids in step.new_block_ids.items():
            self._requests.extend(request_id, block_ids)
        for request_id, token_ids in step.new_prompt_ids.items():
            self._requests.extend_prompt(request_id, token_ids)

    def _add(self, request: NewRequestData) -> None:
        slot = self._requests.add(request)
        self._sampling.set(slot, request)
        self._grammars.enter(request)
        self._adapters.set(slot, request)
        if self._speculation is not None:
            self._speculation.enter(request)

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
        drafts = [step.draft_token_ids.get(request_id, ()) for request_id in request_ids]
        for slot, tokens in zip(slots, drafts, strict=True):
            if tokens:
                self._requests.write_drafts(slot, tokens)
        num_drafts = np.array([len(tokens) for tokens in drafts], np.int64)
        return build_input_batch(
            self._requests, slots, num_scheduled, num_drafts, block_size=self._block_size
        )

    def _sample(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        request_ids: list[str],
        drafts: dict[str, list[int]],
    ) -> ModelRunnerOutput:
        """Choose the next tokens; of several, all but the last were drafts and are computed."""
        choices = self._chooser.choose(logits, request_ids, batch.first_logits, drafts)
        for slot, request_id in zip(batch.slots[batch.sampling], request_ids, strict=True):
            if request_id in drafts and request_id in choices.token_ids:
                self._requests.num_computed[slot] += len(choices.token_ids[request_id]) - 1
        return ModelRunnerOutput(
            sampled_token_ids=choices.token_ids, errors=choices.errors, logprobs=choices.logprobs
        )

    def _drafts(self, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """Guess what follows; what a grammar does not allow is not worth verifying."""
        assert self._speculation is not None
        going = [each for each in output.sampled_token_ids if each not in output.errors]
        drafts = self._speculation.propose(going, self._requests)
        for request_id in [each for each in drafts if each in self._grammars]:
            num_valid = self._grammars.valid_prefix(request_id, drafts[request_id])
            drafts[request_id] = drafts[request_id][:num_valid]
        return {request_id: tokens for request_id, tokens in drafts.items() if tokens}


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch raised for want of memory; its CPU allocator has no class for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

"""An executor without a model: real block tables, deterministic tokens, a stated step cost.

The next token is a hash of the KV contents that a model would read through the block tables
(scripted_memory.py): a wrong, stale or unwritten block changes the output, as it would with a real
model. Used by tests, the simulator and fleets without torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.executor import ExecutorInfo, OutOfDeviceMemoryError
from engine.frontend.logprobs import TokenLogprobs
from engine.grammar import GrammarBackend, GrammarError
from engine.grammar_table import GrammarTable
from engine.kv_groups.group import resolve_groups
from engine.kv_groups.spec import ONE_FULL_ATTENTION_GROUP, KVGroupSpec
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.runner_state import RunnerState, RunningRequest
from engine.scripted_grammar import ruled_token
from engine.scripted_logprobs import scripted_logprobs, scripted_prompt_logprobs
from engine.scripted_memory import SLOT_BYTES, Memory, ScriptedLayer, digest_of, make_layer
from engine.spec_decode.proposer import DraftContext, Proposer
from engine.transfer import BlockCopy, BlockTransfer, HostLoad, HostStore


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a step takes: base, and more per prefill token, decode token and moved block.

    Drafts are decode tokens. A moved block is one that goes to the host tier or comes from it.
    """

    base_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_decode_s: float = 0.0
    per_moved_block_s: float = 0.0

    def of(self, step: SchedulerOutput) -> float:
        """Return the cost of one step."""
        num_prefill = step.num_prefill_tokens
        num_decode = step.total_scheduled_tokens - num_prefill
        return (
            self.base_s
            + num_prefill * self.per_prefill_token_s
            + num_decode * self.per_decode_s
            + self.transfer_s(step)
        )

    def transfer_s(self, step: SchedulerOutput) -> float:
        """Return the part of it that moves between pool and host tier take."""
        return step.num_tier_moves * self.per_moved_block_s


class ScriptedExecutor:
    """Deterministic tokens in [first_token, vocab_size) from the KV contents.

    Greedy requests draw from the contents alone, others from (contents, seed, choice, position).
    `sleep` is called with the cost of each step; None costs nothing. `block_size` is the engine's.
    `max_device_blocks` is what the device has memory for, which others may take while it runs: a
    step over a larger pool is out of memory. None means that there is always enough.
    `proposer` guesses up to `num_draft_tokens` tokens for every request that samples.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 256,
        max_model_len: int = 1 << 20,
        first_token: int = 0,
        kv_groups: tuple[KVGroupSpec, ...] = ONE_FULL_ATTENTION_GROUP,
        cost: StepCost | None = None,
        sleep: Callable[[float], None] | None = None,
        grammars: GrammarBackend | None = None,
        proposer: Proposer | None = None,
        num_draft_tokens: int = 4,
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            execution_digest=f"scripted-{vocab_size}-{first_token}",
            kv_groups=kv_groups,
        )
        self.cost = cost or StepCost()
        self._sleep = sleep
        self._first_token = first_token
        groups = resolve_groups(kv_groups, hash_block_size=block_size)
        block_bytes = max(group.block_size for group in groups) * SLOT_BYTES
        self._memory: Memory = [bytearray(block_bytes) for _ in range(num_blocks)]
        self._host: dict[int, bytes] = {}
        self.num_blocks = num_blocks
        self._is_out_of_memory = False
        self.max_device_blocks: int | None = None
        self._layers: list[ScriptedLayer] = [make_layer(group, self._memory) for group in groups]
        self._state = RunnerState()
        self._grammars = GrammarTable(grammars, vocab_size=vocab_size)
        self._prompt_digests: dict[str, bytes] = {}
        self._submitted: deque[SchedulerOutput] = deque()
        self._weights = b""
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens

    def submit(self, step: SchedulerOutput) -> None:
        """Keep a step; it is computed when it is collected."""
        self._submitted.append(step)

    def collect(self) -> ModelRunnerOutput:
        """Write the scheduled slots, then sample for requests that reached their last token.

        Behind each draft that equals the token sampled in its place, one more is sampled.
        """
        step = self._submitted.popleft()
        self._fold(step)
        self._check_memory(step)
        sampled: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        for request_id in step.num_scheduled_tokens:
            request = self._state.requests[request_id]
            if request.num_computed_tokens > len(request.token_ids):
                continue  # Scheduled ahead, before it was known that this request has failed.
            drafts = step.draft_token_ids.get(request_id, ())
            self._write(request, step.num_computed_tokens[request_id], drafts)
            prompt = scripted_prompt_logprobs(request, step, vocab_size=self.info.vocab_size)
            if prompt:
                prompt_logprobs[request_id] = prompt
            if request.num_computed_tokens == len(request.token_ids):
                try:
                    sampled[request_id] = self._verify(request, drafts)
                except GrammarError as error:
                    errors[request_id] = f"grammar: {error}"
        if self._sleep is not None and step.num_scheduled_tokens:
            self._sleep(self.cost.of(step))
        output = ModelRunnerOutput(
            sampled_token_ids=sampled,
            errors=errors,
            transfer_s=self.cost.transfer_s(step),
            logprobs=self._logprobs(sampled),
            prompt_logprobs=prompt_logprobs,
        )
        self._state.take_output(output)
        if self._proposer is None or not sampled:
            return output
        drafts_of = self._proposer.propose([self._context(request_id) for request_id in sampled])
        return msgspec.structs.replace(output, draft_token_ids=drafts_of)

    def unload(self) -> None:
        """Lose all KV."""
        for block in self._memory:
            block[:] = bytes(len(block))
        self._host.clear()

    def reload(self, model_folder: str | None = None) -> None:
        """Go on; with another folder, with other tokens from then on."""
        if model_folder is not None:
            self._weights = model_folder.encode()
            digest = f"{self.info.execution_digest.partition('@')[0]}@{model_folder}"
            self.info = msgspec.structs.replace(self.info, execution_digest=digest)

    def close(self) -> None:
        """Forget every request."""
        self._state.requests.clear()
        self._prompt_digests.clear()

    def _fold(self, step: SchedulerOutput) -> None:
        """Apply a step to requests and memory, up to what it computes."""
        if step.resync:
            self._prompt_digests.clear()
            self._grammars.clear()
            self._is_out_of_memory = False
        self._state.take_step(step)
        for request_id in step.dropped_request_ids:
            self._prompt_digests.pop(request_id, None)
            self._grammars.drop(request_id)
        for new in step.new_requests:
            self._grammars.enter(new)
            prompt = new.token_ids[: new.num_prompt_tokens]
            self._prompt_digests[new.request_id] = digest_of(prompt)
        for move in step.transfers:
            self._move(move)
        self._resize(step.num_blocks)
        for new in step.new_requests:
            digest = self._prompt_digests[new.request_id]
            tables = self._state.requests[new.request_id].block_ids
            for layer, table in zip(self._layers, tables, strict=True):
                layer.enter(table, new.token_ids, digest, new.num_computed_tokens)

    def _move(self, move: BlockTransfer) -> None:
        match move:
            case BlockCopy(source=source, destination=destination):
                self._memory[destination][:] = self._memory[source]
            case HostStore(block_id=block_id, host_block_id=host_block_id):
                self._host[host_block_id] = bytes(self._memory[block_id])
            case HostLoad(host_block_id=host_block_id, block_id=block_id):
                self._memory[block_id][:] = self._host[host_block_id]

    def _resize(self, num_blocks: int | None) -> None:
        """Lose the contents of blocks that the pool has given up."""
        if num_blocks is None:
            return
        self.num_blocks = num_blocks
        for block in self._memory[num_blocks:]:
            block[:] = bytes(len(block))

    def _check_memory(self, step: SchedulerOutput) -> None:
        limit = self.max_device_blocks
        if limit is not None and self.num_blocks > limit and step.num_scheduled_tokens:
            self._is_out_of_memory = True
        if self._is_out_of_memory:
            raise OutOfDeviceMemoryError(f"{self.num_blocks} blocks do not fit, {limit} do")

    def _context(self, request_id: str) -> DraftContext:
        request = self._state.requests[request_id]
        return DraftContext(
            request_id=request_id,
            token_ids=memoryview(array("i", request.token_ids)),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.source.sampling,
            choice=request.source.choice,
            max_drafts=self._num_draft_tokens,
        )

    def _write(self, request: RunningRequest, start: int, drafts: Sequence[int]) -> None:
        """Write the slots from `start` up to what the step computes, drafts included."""
        digest = self._prompt_digests[request.source.request_id]
        tokens = [*request.token_ids, *drafts] if drafts else request.token_ids
        end = request.num_computed_tokens + len(drafts)
        for layer, table in zip(self._layers, request.block_ids, strict=True):
            layer.write(table, tokens, digest, start, end)

    def _verify(self, request: RunningRequest, drafts: Sequence[int]) -> list[int]:
        """Sample behind the last known token, and behind each draft as long as they are right.

        GrammarError when nothing may follow the last known token; behind a draft that is left to
        the next step.
        """
        sampled = [self._sample(request, 0)]
        while len(sampled) <= len(drafts) and sampled[-1] == drafts[len(sampled) - 1]:
            try:
                sampled.append(self._sample(request, len(sampled)))
            except GrammarError:
                break
        return sampled

    def _logprobs(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, list[TokenLogprobs]]:
        """State the entries of sampled tokens, for the requests that asked."""
        asked = {i: self._state.requests[i].source.sampling.logprobs for i in sampled}
        return {
            request_id: [
                scripted_logprobs(token_id, num_top, vocab_size=self.info.vocab_size)
                for token_id in sampled[request_id]
            ]
            for request_id, num_top in asked.items()
            if num_top is not None
        }

    def _sample(self, request: RunningRequest, num_ahead: int) -> int:
        """Choose what follows the token `num_ahead` behind the last known one."""
        token_id = self._drawn(request, num_ahead)
        self._grammars.accept(request.source.request_id, [token_id])
        return token_id

    def _drawn(self, request: RunningRequest, num_ahead: int) -> int:
        """Hash all contents that the token reads, through the block tables."""
        digest = hashlib.blake2b(digest_size=SLOT_BYTES)
        for layer, block_ids in zip(self._layers, request.block_ids, strict=True):
            layer.read(block_ids, request.num_computed_tokens + num_ahead, digest)
        sampling = request.source.sampling
        position = len(request.token_ids) - request.num_prompt_tokens + num_ahead
        if request.source.lora is not None:
            digest.update(request.source.lora.name.encode())
        digest.update(self._weights)
        if sampling.temperature > 0:
            digest.update(f"{sampling.seed}/{request.source.choice}/{position}".encode())
        span = self.info.vocab_size - self._first_token
        token_id = self._first_token + int.from_bytes(digest.digest(), "big") % span
        masked = {*request.source.eos_token_ids, *sampling.stop_token_ids}
        if request.source.request_id in self._grammars:
            mask = self._grammars.mask(request.source.request_id)
            return ruled_token(
                token_id, mask, banned=masked if position < sampling.min_tokens else set()
            )
        while position < sampling.min_tokens and token_id in masked:
            token_id = self._first_token + (token_id - self._first_token + 1) % span
        return token_id

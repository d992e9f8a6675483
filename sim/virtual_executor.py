"""An executor without a model whose steps take virtual time, by the latency model.

Its tokens are all the same: a trace says how long answers are, not what is in them. It moves the
clock of one replica and knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.executor import ExecutorInfo
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request
from kvindex.foundation.clock import VirtualClock
from sim.latency import LatencyModel

TOKEN_ID = 0


class VirtualExecutor:
    """Samples for requests that reach their last token; notes when each one was first computed.

    `requests` are the live ones of the scheduler, by id. `started_at` loses an entry when it is
    taken.
    """

    def __init__(self, *, num_blocks: int, latency: LatencyModel, clock: VirtualClock) -> None:
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            max_model_len=1 << 40,
            vocab_size=1,
            execution_digest=f"virtual-{latency.name}",
        )
        self.requests: Mapping[str, Request] = {}
        self.started_at: dict[str, float] = {}
        self._latency = latency
        self._clock = clock
        self._submitted: list[SchedulerOutput] = []

    def submit(self, step: SchedulerOutput) -> None:
        """Take in the next step."""
        self._submitted.append(step)

    def collect(self) -> ModelRunnerOutput:
        """Let the time of the oldest step pass and answer it."""
        step = self._submitted.pop(0)
        now = self._clock.monotonic()
        for new in step.new_requests:
            self.started_at.setdefault(new.request_id, now)
        sampled = {}
        prefill_tokens = prefill_pairs = decodes = context = 0
        for request_id, count in step.num_scheduled_tokens.items():
            before = step.num_computed_tokens[request_id]
            if count == 1:
                decodes += 1
                context += before
            else:
                prefill_tokens += count
                prefill_pairs += count * before + count * (count - 1) // 2
            request = self.requests.get(request_id)
            if request is not None and before + count == request.num_tokens:
                sampled[request_id] = [TOKEN_ID]
        if step.num_scheduled_tokens:
            self._clock.advance(
                self._latency.step_s(
                    prefill_tokens=prefill_tokens,
                    prefill_pairs=prefill_pairs,
                    decodes=decodes,
                    context=context,
                )
            )
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def close(self) -> None:
        """Forget everything."""
        self._submitted.clear()
        self.started_at.clear()

"""Runs the choices of an offline batch to their ends, a part of them in the engine at a time.

It knows no prompts and no model; what is asked of the engine is put together in offline.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.output_fold import OutputFold
from engine.messages import EngineOutput, EngineRequest
from worker.core.client import finish_reason_of
from worker.core.sync_client import DEFAULT_SILENCE_S, SyncProcessClient
from worker.offline_progress import BatchProgress


@dataclass(slots=True)
class Job:
    """One choice of one prompt, and what has come of it."""

    request: EngineRequest
    fold: OutputFold
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None

    def take(self, output: EngineOutput) -> int:
        """Fold an output; return how many tokens it added. RequestError if the engine gave up."""
        reason = finish_reason_of(output)
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = self.fold.push(
            output.token_ids,
            logprobs=output.logprobs,
            finish_reason=reason,
            stop_token_id=output.stop_token_id,
        )
        return len(delta.token_ids)


class Batch:
    """Jobs on their way through an engine, at most `max_live` of them in it.

    Whatever ends it early aborts what is left.
    """

    def __init__(
        self,
        client: SyncProcessClient,
        jobs: Sequence[Job],
        *,
        max_live: int,
        progress: BatchProgress,
    ) -> None:
        self._client = client
        self._waiting = deque(jobs)
        self._live: dict[str, Job] = {}
        self._max_live = max_live
        self._progress = progress

    def run(self) -> None:
        """Run all jobs to their ends; raises RequestError when one fails, or the engine dies."""
        try:
            self._feed()
            while self._live:
                outputs = self._client.poll(DEFAULT_SILENCE_S)
                self._take(outputs)
                self._feed()
        finally:
            if self._live and self._client.dead_reason is None:
                self._client.abort(sorted(self._live))

    def _feed(self) -> None:
        entering = []
        while self._waiting and len(self._live) < self._max_live:
            job = self._waiting.popleft()
            self._live[job.request.request_id] = job
            entering.append(job.request)
        if entering:
            self._client.add(entering)

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            job = self._live.get(output.request_id)
            if job is None:
                continue  # A stop string ended it; this was on its way.
            num_tokens = job.take(output)
            self._progress.took(num_tokens, finished=job.fold.finished)
            if job.fold.finished:
                del self._live[output.request_id]
                if output.finish_reason is None:
                    self._client.abort([output.request_id])

"""The face of an engine that the front process talks to.

Implementations: ProcessClient (process_client.py, over ZMQ), DataParallelClient (data_parallel.py,
several cores as one) and AsyncInprocClient (same process; tests and small tools). Scripts without
an event loop use SyncProcessClient (sync_client.py), which has the same verbs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine.frontend.errors import RequestError
from engine.frontend.output_fold import FoldFinishReason
from engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PauseMode,
    PoolSnapshot,
    SleepLevel,
    TenantStats,
)


class EngineClient(Protocol):
    """Asynchronous access to one engine core, or to several that serve as one."""

    @property
    def ranks(self) -> Sequence[EngineClient]:
        """The single cores by data-parallel rank; this client alone when it is one."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What the core said when it became ready; of several, what the first one said."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest statistics; of several cores, their sums."""
        ...

    @property
    def last_heard_at(self) -> float:
        """Monotonic instant of the last message of any core; each beats at least every second."""
        ...

    @property
    def dead_reason(self) -> str | None:
        """Why there is no core left, None while one lives."""
        ...

    def choose_rank(self) -> int:
        """Return the rank that should compute the next prompt, for choices that share one."""
        ...

    def generate(
        self, request: EngineRequest, *, dp_rank: int | None = None, interval: int = 1
    ) -> AsyncIterator[EngineOutput]:
        """Run a request; closing the iterator early aborts it in the core.

        `dp_rank` names the core that should; None leaves it to the load, and so does a rank that
        is dead. After the first output, `interval` tokens come at a time, as far as that takes no
        longer than a second. The last output has a `finish_reason`. Raises RequestError:
        `context_length_exceeded` or `invalid_request` when the core refuses the request,
        `engine_dead` when the core dies.
        """
        ...

    async def extend_prompt(
        self, request_id: str, token_ids: Sequence[int], *, is_last: bool
    ) -> None:
        """Append to the open prompt of a request that is being generated.

        What the core refuses ends the request with an error; ids that are not live are ignored.
        """
        ...

    async def snapshots(self) -> list[PoolSnapshot]:
        """Return what each living core has cached, each as of one of its step borders."""
        ...

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False where a core, unchanged, has requests that hold some."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop admitting (`new`) or computing (`all`) in every core; holds when this returns."""
        ...

    async def resume(self) -> None:
        """Go on after a pause; a no-op without one."""
        ...

    async def resize(self, num_blocks: int) -> int:
        """Give every core's KV cache so many blocks, in whole slabs and within what it can have.

        Returns the blocks of the smallest one then. Requests that fit no more end.
        """
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back in every core until `wake_up`; nothing is cached any more.

        Live requests wait, and go on afterwards. RequestError `conflict` when a core cannot.
        """
        ...

    async def wake_up(self) -> None:
        """Go on after a sleep; a no-op without one."""
        ...

    async def update_weights(self, model_folder: str) -> None:
        """Go on with the weights of another checkpoint of the same shape; it is awake then.

        Nothing is cached any more, live requests go on with the new weights, and `info` names
        their execution digest. RequestError `conflict` when it cannot: then the old ones serve.
        """
        ...

    async def tenant_stats(self) -> dict[str, TenantStats]:
        """Return the share of each tenant, "" for requests without one, over all cores."""
        ...

    async def close(self) -> None:
        """End the cores: nothing of them is left when this returns. Idempotent."""
        ...


def finish_reason_of(output: EngineOutput) -> FoldFinishReason | None:
    """Return why a choice ends with this output; RequestError if the engine gave up on it."""
    reason = output.finish_reason
    if reason == "error" or reason == "abort":
        raise RequestError(
            output.error_kind or "internal", output.error or "the engine ended the request"
        )
    return reason

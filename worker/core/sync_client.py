"""Starts an engine-core process and talks to it without an event loop: scripts, benchmarks.

Every wait has a deadline and watches the core's process, so a core that dies or hangs ends the
call with an error. One thread uses it; nothing happens between calls.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from engine.frontend.errors import RequestError
from engine.messages import (
    AbortRequests,
    AddRequests,
    AskTenantStats,
    CoreDead,
    CoreOutputs,
    CoreReady,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FallAsleep,
    FromCore,
    Pause,
    PauseMode,
    PoolSnapshot,
    ResetPrefixCache,
    Resize,
    Resume,
    Shutdown,
    SleepAnswer,
    SleepLevel,
    TakeSnapshot,
    TenantStats,
    ToCore,
    UpdateWeights,
    Utility,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from kvindex.foundation.errors import DependencyError
from worker.core.core_link import (
    CLOSE_TIMEOUT_S,
    CORE_MODULE,
    AnswerT,
    CoreSockets,
    decode,
    start_child,
)
from worker.core.spec import CoreSpec

_log = logging.getLogger("prefixfleet.core_client")
_DEATH_CHECK_S = 0.02
_LAST_MESSAGE_S = 0.1
DEFAULT_SILENCE_S = 60.0


class SyncProcessClient:
    """An engine core in a process of its own; a context manager that closes it.

    `silence_s`: a core that sends nothing for this long, not even a heartbeat, counts as hung.
    """

    def __init__(
        self,
        spec: CoreSpec,
        *,
        socket_dir: Path,
        start_timeout_s: float = 300.0,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        """Start the core and wait until it can serve; DependencyError when it cannot.

        The endpoints of `spec` are replaced by sockets in `socket_dir`, a folder of this core
        alone. The core dies with the calling thread.
        """
        self._silence_s = start_timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._outputs: list[EngineOutput] = []
        self._results: dict[int, msgspec.Raw] = {}
        self._num_calls = 0
        self._last_heard_at = time.monotonic()
        self._is_closed = False
        self._info: EngineInfo | None = None
        self.stats = EngineStats()
        self.dead_reason: str | None = None
        self._sockets = CoreSockets(socket_dir, zmq.Context())
        self._process = start_child(CORE_MODULE, self._sockets.told_to(spec))
        try:
            while self._info is None:
                self._receive(start_timeout_s)
        except RequestError as error:
            self.close()
            raise DependencyError(f"{spec.replica_id}: {error.message}") from None
        except BaseException:
            self.close()
            raise
        self._silence_s = silence_s

    def __enter__(self) -> SyncProcessClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """What the core said when it became ready."""
        assert self._info is not None
        return self._info

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, whose ids must not be live; what comes of them is in `poll`."""
        self._send(AddRequests(requests=list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; outputs that are on their way may still come."""
        self._send(AbortRequests(request_ids=list(request_ids)))

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Return the outputs that have come, waiting up to `timeout_s` for the first.

        A refused request has one output, with `finish_reason` "error". Raises RequestError
        (`engine_dead`) once the core is gone and every output that it sent was returned.
        """
        deadline = time.monotonic() + timeout_s
        while not self._outputs:
            self._receive(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                break
        outputs, self._outputs = self._outputs, []
        return outputs

    def generate(self, requests: Sequence[EngineRequest]) -> Iterator[EngineOutput]:
        """Run requests to their ends, yielding outputs as they come; leaving early aborts the rest.

        Nothing else may run meanwhile. Raises RequestError when the core dies or hangs.
        """
        live = {request.request_id for request in requests}
        self.add(requests)
        try:
            while live:
                for output in self.poll(self._silence_s):
                    if output.finish_reason is not None:
                        live.discard(output.request_id)
                    yield output
        finally:
            if live and self.dead_reason is None:
                self.abort(sorted(live))

    def snapshot(self) -> PoolSnapshot:
        """Return every cached block as of a step border."""
        return self._call(TakeSnapshot(), PoolSnapshot)

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False, with nothing changed, while requests hold some."""
        return self._call(ResetPrefixCache(preempt_running), bool)

    def pause(self, mode: PauseMode) -> None:
        """Stop admitting, or computing; see PauseMode."""
        self._call(Pause(mode), bool)

    def resume(self) -> None:
        """Go on after a pause."""
        self._call(Resume(), bool)

    def resize(self, num_blocks: int) -> int:
        """Make the KV cache larger or smaller; return the blocks that it then has."""
        return self._call(Resize(num_blocks), int)

    def sleep(self, level: SleepLevel) -> None:
        """Give memory back until `wake_up`; RequestError `conflict` when it cannot."""
        self._change(FallAsleep(level))

    def wake_up(self) -> None:
        """Go on after a sleep."""
        self._call(WakeUp(), bool)

    def update_weights(self, model_folder: str) -> None:
        """Go on with other weights of the same shape; RequestError `conflict` when it cannot."""
        self._change(UpdateWeights(model_folder))

    def _change(self, utility: FallAsleep | UpdateWeights) -> None:
        answer = self._call(utility, SleepAnswer)
        self._info = answer.info
        if answer.problem is not None:
            raise RequestError("conflict", answer.problem)

    def tenant_stats(self) -> dict[str, TenantStats]:
        """Return each tenant's share, "" for requests without one."""
        return self._call(AskTenantStats(), dict[str, TenantStats])

    def close(self) -> None:
        """End the core: politely, then by force; leaves no process and no socket. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # A core that still loads, or hangs, reads no messages.
        if self._info is not None and self.dead_reason is None:
            self._send(Shutdown())
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.warning("engine core pid=%d did not end in time, killed", self.pid)
        self._process.kill()
        self._process.wait()
        self.dead_reason = self.dead_reason or "the engine was closed"
        self._sockets.close()

    def _call(self, utility: Utility, answer: type[AnswerT]) -> AnswerT:
        self._num_calls += 1
        call_id = self._num_calls
        self._send(UtilityCall(call_id=call_id, utility=utility))
        while call_id not in self._results:
            self._receive(self._silence_s)
        return msgspec.msgpack.decode(self._results.pop(call_id), type=answer)

    def _send(self, message: ToCore) -> None:
        if self.dead_reason is not None:
            raise RequestError("engine_dead", self.dead_reason)
        self._sockets.input.send(self._encoder.encode(message))

    def _receive(self, timeout_s: float) -> None:
        """Take in one message, if one comes in time; RequestError when the core is gone or hangs.

        What a dead core sent before its end is taken in first.
        """
        if self._is_closed:
            self._die("the engine was closed")
        deadline = time.monotonic() + timeout_s
        while True:
            # Of a core that is gone, a last message may still be on its way.
            is_dead = self.dead_reason is not None or self._process.poll() is not None
            left_s = max(0.0, deadline - time.monotonic())
            wait_s = _LAST_MESSAGE_S if is_dead else min(_DEATH_CHECK_S, left_s)
            if self._sockets.output.poll(int(wait_s * 1000)):
                self._take(self._sockets.output.recv())
                return
            now = time.monotonic()
            if is_dead:
                self._die(f"the engine core ended with exit code {self._process.poll()}")
            elif now - self._last_heard_at > self._silence_s:
                self._die(f"the engine core has not been heard for {self._silence_s:g} s")
            elif now >= deadline:
                return

    def _take(self, payload: bytes) -> None:
        message = decode(self._decoder, payload, _log)
        if message is None:
            return
        self._last_heard_at = time.monotonic()
        match message:
            case CoreOutputs(outputs=outputs, stats=stats):
                self.stats = stats
                self._outputs += outputs
            case UtilityResult(call_id=call_id, value=value):
                self._results[call_id] = value
            case CoreReady(info=info):
                self._info = info
            case CoreDead(error=reason):
                self.dead_reason = f"the engine core failed: {reason}"

    def _die(self, reason: str) -> None:
        self.dead_reason = self.dead_reason or reason
        raise RequestError("engine_dead", self.dead_reason)

"""The engine-core process: one loop that reads requests, runs steps and sends what came of them.

Requests are read between steps, so an abort takes effect within one step. Everything that a
client may see travels over two local sockets; KV events go out on their own. It knows no HTTP,
and torch is imported only to build a model executor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import zmq

from engine.core import EngineCore
from engine.executor import Executor
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
    ExtendPrompt,
    FallAsleep,
    FromCore,
    Pause,
    PoolSnapshot,
    ResetPrefixCache,
    Resize,
    Resume,
    Shutdown,
    SleepAnswer,
    TakeSnapshot,
    TenantStats,
    ToCore,
    UpdateWeights,
    Utility,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from engine.step_log import RecordingExecutor
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError, PrefixFleetError
from kvindex.foundation.logs import setup_logging
from worker.core.core_link import decode
from worker.core.event_outlets import EventOutlets
from worker.core.garbage import load_without_collecting, settle_after_loading
from worker.core.output_router import refusal
from worker.core.spec import CoreSpec
from worker.executors.build import build_executor

_log = logging.getLogger("prefixfleet.core")
_LINGER_MS = 2000


class CoreProcess:
    """The state of the loop; `run` returns when it is told to shut down."""

    def __init__(self, spec: CoreSpec, core: EngineCore, boot_ns: int) -> None:
        self._core = core
        self._boot_ns = boot_ns
        self._dp_rank = spec.dp_rank
        self._heartbeat_s = spec.heartbeat_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.bind(spec.input_endpoint)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.setsockopt(zmq.LINGER, _LINGER_MS)
        self._output.connect(spec.output_endpoint)
        self._outlets = EventOutlets(spec, core, boot_ns=boot_ns)
        self._stats_sent_at = 0.0
        self._stopping = False

    def run(self) -> None:
        """Serve until a Shutdown message."""
        self._send(CoreReady(info=self._info()))
        settle_after_loading()
        while not self._stopping:
            self._read_input()
            outputs: list[EngineOutput] = []
            if self._core.has_work:
                outputs = self._core.step()
                self._publish_events()
            idle_s = time.monotonic() - self._stats_sent_at
            if outputs or idle_s >= self._heartbeat_s:
                self._send(CoreOutputs(outputs=outputs, stats=self._core.stats()))

    def _info(self) -> EngineInfo:
        """Describe the core as it is now."""
        outlets = self._outlets
        return self._core.info(
            boot_ns=self._boot_ns, events=outlets.events, announced=outlets.announced
        )

    def report_death(self, error: BaseException) -> None:
        """Tell the front why the loop ended."""
        self._send(CoreDead(error=f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Flush and close sockets; free the executor."""
        self._outlets.close()
        self._input.close(linger=0)
        self._output.close()
        self._context.term()
        self._core.executor.close()

    def _read_input(self) -> None:
        """Take in every message that has arrived; wait for one heartbeat when there is no work."""
        timeout_ms = 0 if self._core.has_work else int(self._heartbeat_s * 1000)
        while self._input.poll(timeout_ms):
            self._handle(self._input.recv())
            timeout_ms = 0

    def _handle(self, payload: bytes) -> None:
        match decode(self._decoder, payload, _log):
            case AddRequests(requests=requests):
                for request in requests:
                    self._add(request)
            case ExtendPrompt() as part:
                self._extend(part)
            case AbortRequests(request_ids=ids):
                self._core.abort(ids)
            case UtilityCall(call_id=call_id, utility=utility):
                value = self._encoder.encode(self._answer(utility))
                self._send(UtilityResult(call_id=call_id, value=msgspec.Raw(value)))
            case Shutdown():
                self._stopping = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            self._refuse(request.request_id, error)

    def _extend(self, part: ExtendPrompt) -> None:
        """Append to a prompt; a part that is refused ends the request."""
        try:
            self._core.extend_prompt(part.request_id, part.token_ids, is_last=part.is_last)
        except RequestError as error:
            self._core.abort([part.request_id])
            self._refuse(part.request_id, error)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self._send(CoreOutputs(outputs=[refusal(request_id, error)], stats=self._core.stats()))

    def _answer(
        self, utility: Utility
    ) -> PoolSnapshot | bool | int | dict[str, TenantStats] | SleepAnswer:
        match utility:
            case TakeSnapshot():
                self._publish_events()
                return PoolSnapshot(
                    boot_ns=self._boot_ns,
                    seq=self._outlets.last_seq,
                    dp_rank=self._dp_rank,
                    entries=self._core.snapshot_entries(),
                )
            case ResetPrefixCache(preempt_running=preempt_running):
                done = self._core.reset_prefix_cache(preempt_running=preempt_running)
                self._publish_events()
                return done
            case Pause(mode=mode):
                self._core.pause(mode)
                self._send_stats()  # before the answer, which tells that they are current
                return True
            case Resume():
                self._core.resume()
                self._send_stats()
                return True
            case Resize(num_blocks=num_blocks):
                ended = self._core.resize(num_blocks)
                self._publish_events()
                self._send_stats(ended)
                return self._core.kv_cache.pool.num_blocks
            case AskTenantStats():
                return self._core.tenant_stats()
            case FallAsleep() | UpdateWeights():
                return self._sleep(utility)
            case WakeUp():
                self._core.wake_up()
                self._send_stats()
                return True

    def _sleep(self, utility: FallAsleep | UpdateWeights) -> SleepAnswer:
        """Fall asleep, or change the weights; what the index knows of is gone at once."""
        outputs: list[EngineOutput] = []
        problem: str | None = None
        try:
            if isinstance(utility, FallAsleep):
                outputs = self._core.sleep(utility.level)
            else:
                outputs, problem = self._core.update_weights(utility.model_folder)
        except ConfigError as error:
            problem = str(error)
        self._publish_events()
        self._send_stats(outputs)
        return SleepAnswer(self._info(), problem)

    def _send_stats(self, outputs: list[EngineOutput] | None = None) -> None:
        self._send(CoreOutputs(outputs=outputs or [], stats=self._core.stats()))

    def _publish_events(self) -> None:
        """Publish what changed, at once: an idle engine must not sit on its news."""
        self._outlets.publish(self._core.take_events())

    def _send(self, message: FromCore) -> None:
        self._output.send(self._encoder.encode(message))
        if isinstance(message, CoreOutputs):
            self._stats_sent_at = time.monotonic()


@contextlib.contextmanager
def _recorded(executor: Executor, step_log: str | None) -> Iterator[Executor]:
    """Record what the executor does inside the block, if there is a file for it."""
    if step_log is None:
        yield executor
        return
    Path(step_log).parent.mkdir(parents=True, exist_ok=True)
    with open(step_log, "wb", opener=partial(os.open, mode=0o600)) as stream:
        yield RecordingExecutor(executor, stream)


def _core_name(spec: CoreSpec) -> str:
    """Return what log lines call this core: ranks are told apart from the second on."""
    return f"{spec.replica_id}-core{spec.dp_rank or ''}"


def main() -> int:
    """Run the core described by the JSON on standard input."""
    # The front decides when the core ends; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSpec)
    setup_logging(_core_name(spec))
    boot_ns = time.time_ns()
    with contextlib.ExitStack() as stack:
        try:
            executor = stack.enter_context(_recorded(build_executor(spec), spec.step_log))
            core = EngineCore(spec.engine, executor, SystemClock())
            process = CoreProcess(spec, core, boot_ns)
        except (PrefixFleetError, OSError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 3
        return _serve(process)


def _serve(process: CoreProcess) -> int:
    """Run the loop to its end; return the exit code."""
    try:
        process.run()
    except Exception as error:  # noqa: BLE001 - the process ends here, and the front is told
        _log.exception("engine core failed")
        process.report_death(error)
        return 1
    finally:
        process.close()
    return 0


if __name__ == "__main__":
    load_without_collecting()
    raise SystemExit(main())

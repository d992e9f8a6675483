"""The engine-core process: one loop that reads requests, runs steps and sends what came of them.

Requests are read between steps, so an abort takes effect within one step. Everything that a
client may see travels over two local sockets; KV events go out on their own. It knows no HTTP,
and torch is imported only to build a model executor.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time

import msgspec
import zmq

from engine.core import EngineCore
from engine.executor import Executor
from engine.frontend.errors import RequestError
from engine.messages import (
    AbortRequests,
    AddRequests,
    CoreDead,
    CoreOutputs,
    CoreReady,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FromCore,
    PoolSnapshot,
    Shutdown,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from engine.scripted_executor import ScriptedExecutor
from kvindex.events import EventBatch
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import PrefixFleetError
from kvindex.foundation.logs import setup_logging
from kvindex.hashing import known_answer
from kvindex.publisher import EventPublisher
from kvindex.topic import KvTopic
from worker.core.spec import CoreSpec

_log = logging.getLogger("prefixfleet.core")
_LINGER_MS = 2000


class CoreProcess:
    """The state of the loop; `run` returns when it is told to shut down."""

    def __init__(self, spec: CoreSpec, core: EngineCore, boot_ns: int) -> None:
        self._core = core
        self._boot_ns = boot_ns
        self._heartbeat_s = spec.heartbeat_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.connect(spec.input_endpoint)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.setsockopt(zmq.LINGER, _LINGER_MS)
        self._output.connect(spec.output_endpoint)
        self._publisher = _make_publisher(spec, boot_ns)
        self._last_sent_at = 0.0
        self._stopping = False

    def run(self) -> None:
        """Serve until a Shutdown message."""
        self._send(CoreReady(info=self._info()))
        while not self._stopping:
            self._read_input()
            outputs: list[EngineOutput] = []
            if self._core.has_work:
                outputs = self._core.step()
                self._publish_events()
            idle_s = time.monotonic() - self._last_sent_at
            if outputs or idle_s >= self._heartbeat_s:
                self._send(CoreOutputs(outputs=outputs, stats=self._core.stats()))

    def report_death(self, error: BaseException) -> None:
        """Tell the front why the loop ended."""
        self._send(CoreDead(error=f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Flush and close sockets; free the executor."""
        if self._publisher is not None:
            self._publisher.close()
        self._input.close(linger=0)
        self._output.close()
        self._context.term()
        self._core.executor.close()

    def _info(self) -> EngineInfo:
        core, publisher = self._core, self._publisher
        return EngineInfo(
            boot_ns=self._boot_ns,
            num_blocks=core.kv_cache.pool.num_usable,
            block_size=core.config.block_size,
            max_model_len=core.max_model_len,
            known_answer=known_answer(core.config.hash_scheme),
            events_endpoint=publisher.endpoint if publisher else None,
            replay_endpoint=publisher.replay_endpoint if publisher else None,
            execution_digest=core.executor.info.execution_digest,
            vocab_size=core.vocab_size,
        )

    def _read_input(self) -> None:
        """Take in every message that has arrived; wait for one heartbeat when there is no work."""
        timeout_ms = 0 if self._core.has_work else int(self._heartbeat_s * 1000)
        while self._input.poll(timeout_ms):
            self._handle(self._input.recv())
            timeout_ms = 0

    def _handle(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            _log.error("dropped a message that does not decode error=%s", error)
            return
        match message:
            case AddRequests(requests=requests):
                for request in requests:
                    self._add(request)
            case AbortRequests(request_ids=ids):
                self._core.abort(ids)
            case UtilityCall():
                self._answer(message)
            case Shutdown():
                self._stopping = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            refused = EngineOutput(
                request_id=request.request_id,
                finish_reason="error",
                error=error.message,
                error_kind=error.kind,
            )
            self._send(CoreOutputs(outputs=[refused], stats=self._core.stats()))

    def _answer(self, call: UtilityCall) -> None:
        match call.method:
            case "snapshot":
                self._publish_events()
                last_seq = self._publisher.last_seq if self._publisher else None
                snapshot = PoolSnapshot(
                    boot_ns=self._boot_ns,
                    seq=-1 if last_seq is None else last_seq,
                    entries=self._core.snapshot_entries(),
                )
                self._send(UtilityResult(call_id=call.call_id, snapshot=snapshot))
            case "reset_prefix_cache":
                ok = self._core.reset_prefix_cache(preempt_running=call.preempt_running)
                self._publish_events()
                self._send(UtilityResult(call_id=call.call_id, ok=ok))

    def _publish_events(self) -> None:
        """Publish what changed, at once: an idle engine must not sit on its news."""
        events = self._core.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(EventBatch(time.time(), events, 0))

    def _send(self, message: FromCore) -> None:
        self._output.send(self._encoder.encode(message))
        self._last_sent_at = time.monotonic()


def _make_publisher(spec: CoreSpec, boot_ns: int) -> EventPublisher | None:
    if not spec.publish_events:
        return None
    return EventPublisher(
        str(KvTopic(spec.replica_id, boot_ns)),
        endpoint=spec.events_endpoint,
        replay_endpoint=spec.replay_endpoint,
    )


def build_executor(spec: CoreSpec) -> Executor:
    """Build the executor that the spec asks for; the only place that leads to torch."""
    if spec.scripted is not None:
        scripted = spec.scripted
        return ScriptedExecutor(
            num_blocks=scripted.num_blocks,
            block_size=spec.engine.block_size,
            vocab_size=scripted.vocab_size,
            max_model_len=scripted.max_model_len,
            first_token=scripted.first_token,
            cost=scripted.cost,
            sleep=time.sleep,
        )
    # Read when torch is loaded. Threads that wait for each other spin for a moment, then sleep:
    # spinning for long starves a shared machine, never spinning halves the speed of a decode step.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from worker.executors.uniproc import UniprocExecutor

    assert spec.model_folder is not None, "neither a model folder nor a scripted model"
    return UniprocExecutor(
        spec.model_folder,
        dtype=spec.dtype,
        engine_config=spec.engine,
        num_threads=spec.num_threads,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
    )


def settle_garbage_collector() -> None:
    """Take what is loaded out of garbage collection, and collect the rest less often.

    A step makes a few objects per running request and no cycles; with Python's own thresholds the
    collector takes half the time of a step with 1,024 requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def main() -> int:
    """Run the core described by the JSON on standard input."""
    # The front decides when the core ends; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSpec)
    setup_logging(f"{spec.replica_id}-core")
    boot_ns = time.time_ns()
    try:
        core = EngineCore(spec.engine, build_executor(spec), SystemClock())
    except PrefixFleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 3
    settle_garbage_collector()
    process = CoreProcess(spec, core, boot_ns)
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
    raise SystemExit(main())

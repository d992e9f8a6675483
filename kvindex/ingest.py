"""The ingester: follows one engine's event stream into the index, and repairs what breaks.

One loop follows and repairs, another keeps the lease. Whatever goes wrong becomes a `Fault`, and
every fault takes the same path: replay if that can do it, else a new snapshot, with growing
delays in between. It knows no HTTP and not where snapshots come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator

import msgspec

from kvindex.event_stream import StreamPosition, concerns, index_ops
from kvindex.events import decode_batch
from kvindex.foundation.errors import DependencyError, PrefixFleetError, WireError
from kvindex.index import LoadReport, PrefixIndex, SequencedOps, Target, TrustMode
from kvindex.ingest_source import IngestSource, Trust
from kvindex.ingest_state import Fault, IngestCounters
from kvindex.registry import Registry
from kvindex.renewal_turns import RenewalTurns
from kvindex.subscriber import EventFrame, EventSource

logger = logging.getLogger("prefixfleet.kvindex.ingest")

LEASE_S = 10.0
RENEW_S = 2.0
MAX_FRAMES_PER_APPLY = 256
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0


class Ingester:
    """Keep the index of one target equal to what its engine holds.

    `mode` is EXACT while it is; DEGRADED while a fault is being repaired; FALLBACK before the
    first snapshot and while the index or the engine core cannot be reached. `reason` says why.
    """

    def __init__(
        self,
        target: Target,
        *,
        subscriber: EventSource,
        index: PrefixIndex,
        registry: Registry,
        source: IngestSource,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self.target = target
        self.mode: TrustMode = "FALLBACK"
        self.reason = "no snapshot yet"
        self.epoch: int | None = None
        self.counters = IngestCounters()
        self._subscriber = subscriber
        self._index = index
        self._registry = registry
        self._source = source
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._position = StreamPosition(target)
        self._applied_seq: int | None = None
        self._last_epoch: int | None = None
        self._fault: Fault | None = Fault(self.reason)
        self._delay_s = 0.0
        self._turns = RenewalTurns(renew_s, self._report)
        self._rebuilds: list[asyncio.Future[int]] = []
        self._rebuild_asked = asyncio.Event()

    @property
    def trust(self) -> Trust:
        """What the index is told: our own mode, or the engine's where that is worse."""
        return Trust(self.mode, self.reason).at_most(self._source.trust())

    async def run(self) -> None:
        """Follow the engine until cancelled, then deregister the target and its record."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._keep_lease())
        finally:
            await self._leave()

    async def rebuild(self) -> int:
        """Replace what the index holds by a new snapshot; return the number of its blocks.

        Raises DependencyError with the reason when that fails; it goes on being tried.
        """
        rebuilt: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._rebuilds.append(rebuilt)
        self._rebuild_asked.set()
        return await rebuilt

    def report_now(self) -> None:
        """Renew lease and record soon instead of in its turn: something has changed."""
        self._turns.ask()

    async def publish_record(self) -> None:
        """Write the replica's record now; a registry that is away is noted and left to its turn.

        It is kept alive also while the index is down: the replica can still serve.
        """
        epoch = self._last_epoch if self._last_epoch is not None else self._position.boot_ns
        if epoch is None:
            return
        try:
            await self._registry.publish(self._source.make_record(epoch), lease_s=self._lease_s)
        except DependencyError as error:
            logger.warning("target=%s record not renewed: %s", self.target, error)

    # Following

    async def _follow(self) -> None:
        # The task outlives a wait that times out: cancelling a receive could lose its frames.
        receiving = asyncio.create_task(self._subscriber.receive(MAX_FRAMES_PER_APPLY))
        asked = asyncio.create_task(self._rebuild_asked.wait())
        try:
            while True:
                if self._fault is not None:
                    await self._repair(self._fault)
                    continue
                done, _ = await asyncio.wait(
                    {receiving, asked},
                    timeout=self._renew_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if asked in done:
                    self._break("DEGRADED", Fault("a rebuild was asked for"))
                    self._rebuild_asked.clear()
                    asked = asyncio.create_task(self._rebuild_asked.wait())
                    continue
                with self._noting_faults():
                    if not done:
                        await self._fetch_lost_tail()
                        continue
                    received = receiving
                    receiving = asyncio.create_task(self._subscriber.receive(MAX_FRAMES_PER_APPLY))
                    await self._take(received.result())
        finally:
            receiving.cancel()
            asked.cancel()
            self._answer_rebuilds(DependencyError("the replica stops following its engine"))

    async def _take(self, frames: Iterable[EventFrame]) -> None:
        """Apply live frames, up to the first sign of a restart."""
        batches: list[SequencedOps] = []
        for frame in frames:
            decoded = self._decode(frame)
            if decoded is None:
                continue
            verdict = self._position.judge(frame)
            if verdict == "restarted":
                # What is left of `frames` was published before the snapshot that comes now.
                self._note_restart()
                return
            if verdict == "follow":
                batches.append(decoded)
            else:
                self.counters.num_ignored_frames += 1
        if batches and await self._apply(batches):
            self._delay_s = 0.0

    async def _fetch_lost_tail(self) -> None:
        """Ask a quiet engine for what it published last: a lost last batch shows no gap.

        The last batch that is known is asked for too: an engine that does not have it has
        restarted and not published as much yet. One that gives no answer may have lost anything.
        """
        if self._subscriber.can_replay and self._source.is_alive():
            last_seq = self._applied_seq
            try:
                frames = await self._subscriber.replay(last_seq or 0)
            except WireError as error:
                self.counters.num_failed_replays += 1
                self._break("DEGRADED", Fault(f"no events come: {error}"))
                return
            if last_seq is not None and not frames:
                self._note_restart()
                return
            await self._take_replayed(frames)
        self._delay_s = 0.0

    def _decode(self, frame: EventFrame) -> SequencedOps | None:
        """Return a frame's operations, None when it is of another rank; may raise WireError."""
        try:
            decoded = decode_batch(frame.payload)
            ops = index_ops(decoded.batch)
        except WireError:
            self.counters.num_undecodable += 1
            raise
        self.counters.num_unknown_fields += decoded.num_unknown_fields
        self.counters.num_unknown_events += decoded.num_unknown_events
        if not concerns(decoded.batch, self.target):
            self.counters.num_ignored_frames += 1
            return None
        return SequencedOps(frame.seq, ops)

    async def _apply(self, batches: list[SequencedOps]) -> bool:
        """Apply batches; False, with a fault noted, when they do not all fit."""
        epoch = self.epoch
        if epoch is None:
            return False
        result = await self._index.apply(self.target, epoch, batches)
        if result.status == "fenced":
            self._lose_epoch(epoch)
            return False
        before = self._next_seq
        self._applied_seq = result.applied_seq
        self.counters.num_batches += max(0, self._next_seq - before)
        if result.status == "gap":
            self.counters.num_gaps += 1
            reason = f"event batches are missing from sequence number {self._next_seq} on"
            self._break("DEGRADED", Fault(reason, self._next_seq))
            return False
        return True

    @property
    def _next_seq(self) -> int:
        return 0 if self._applied_seq is None else self._applied_seq + 1

    # Repairing

    async def _repair(self, fault: Fault) -> None:
        """Try once to repair a fault; wait before, when the last repair did not hold."""
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        self._delay_s = min(max(2 * self._delay_s, FIRST_DELAY_S), MAX_DELAY_S)
        self._fault = None
        answer: int | DependencyError | None = None
        with self._noting_faults():
            first = None if self._rebuilds else fault.replay_from
            if first is None or not await self._replay(first):
                # Rebuilding covers whatever was noted until here; what comes up meanwhile stays.
                self._fault = None
                answer = await self._rebuild()
        if self._fault is None:
            self._set_mode("EXACT", "")
        elif answer is None:
            answer = DependencyError(self._fault.reason)
        if answer is not None:
            self._answer_rebuilds(answer)

    def _answer_rebuilds(self, answer: int | DependencyError) -> None:
        for rebuilt in self._rebuilds:
            if rebuilt.done():
                continue  # Whoever asked has gone.
            if isinstance(answer, DependencyError):
                rebuilt.set_exception(answer)
            else:
                rebuilt.set_result(answer)
        self._rebuilds.clear()

    async def _replay(self, from_seq: int) -> bool:
        """Fill a gap from the engine's own buffer; False when that cannot be done."""
        self.counters.num_replays += 1
        try:
            frames = await self._subscriber.replay(from_seq)
            if frames and frames[0].seq <= from_seq and await self._take_replayed(frames):
                return True
        except WireError as error:
            logger.warning("target=%s %s", self.target, error)
        self.counters.num_failed_replays += 1
        return False

    async def _take_replayed(self, frames: list[EventFrame]) -> bool:
        """Apply replayed frames; False when they are of another boot or do not fit."""
        batches: list[SequencedOps] = []
        for frame in frames:
            verdict = self._position.judge_replayed(frame)
            if verdict == "restarted":
                self._note_restart()
                return False
            decoded = self._decode(frame)
            if decoded is not None and verdict == "follow":
                batches.append(decoded)
        return await self._apply(batches) if batches else True

    async def _rebuild(self) -> int:
        """Load a snapshot, under a new epoch when there is none or the engine is a new one.

        Returns the number of its blocks.
        """
        if not self._source.is_alive():
            raise DependencyError(f"the engine core of {self.target} shows no heartbeat")
        if self.epoch is None and self._position.boot_ns is not None:
            await self._register(self._position.boot_ns)
        data = await self._source.snapshot()
        if self.epoch is None or data.boot_ns != self._position.boot_ns:
            await self._register(data.boot_ns)
        epoch = self.epoch
        self.counters.num_snapshots += 1
        if epoch is None or not await self._index.load_snapshot(
            self.target, epoch, seq=data.seq, ops=data.ops
        ):
            self._lose_epoch(epoch)
            raise DependencyError(f"the lease of {self.target} lapsed while a snapshot was loaded")
        self._applied_seq = data.seq if data.seq >= 0 else None
        return sum(len(op.hashes) for op in data.ops)

    async def _register(self, boot_ns: int) -> None:
        """Open an epoch: what the index held of the target is gone with this call."""
        self.epoch = None
        self._position.boot_ns = boot_ns
        # An emptied store remembers no epoch; ours never comes twice all the same.
        floor = boot_ns if self._last_epoch is None else max(boot_ns, self._last_epoch + 1)
        epoch = await self._index.register(
            self.target, boot_ns=floor, lease_s=self._lease_s, layout=self._source.layout()
        )
        self.epoch = self._last_epoch = epoch
        self._applied_seq = None
        self.counters.num_registrations += 1
        logger.info("target=%s epoch=%d registered", self.target, epoch)

    # Trust and lease

    def _break(self, mode: TrustMode, fault: Fault) -> None:
        self._fault = fault
        self._set_mode(mode, fault.reason)

    @contextlib.contextmanager
    def _noting_faults(self) -> Iterator[None]:
        """Turn what is raised inside into a fault to repair; the loop itself never ends by it."""
        try:
            yield
        except DependencyError as error:
            self._break("FALLBACK", Fault(str(error)))
        except PrefixFleetError as error:
            self._break("DEGRADED", Fault(str(error)))
        except Exception as error:
            logger.exception("target=%s unexpected failure", self.target)
            self._break("DEGRADED", Fault(f"{type(error).__name__}: {error}"))

    def _note_restart(self) -> None:
        self.epoch = None
        self._break("DEGRADED", Fault("the engine restarted"))

    def _lose_epoch(self, epoch: int | None) -> None:
        """Note that an epoch is over, unless a newer one was opened meanwhile."""
        if self.epoch == epoch:
            self.epoch = None
            self._break("DEGRADED", Fault("the lease lapsed, or the index was emptied"))

    def _set_mode(self, mode: TrustMode, reason: str) -> None:
        if (mode, reason) != (self.mode, self.reason):
            logger.info("target=%s mode=%s reason=%s", self.target, mode, reason or "-")
            self.mode, self.reason = mode, reason
            self._turns.ask()

    async def _keep_lease(self) -> None:
        """Renew lease and record every `renew_s`, and at once when there is news."""
        while True:
            await self._turns.next()
            if not self._source.is_alive():
                reason = f"the engine core of {self.target} shows no heartbeat"
                self._break("FALLBACK", Fault(reason))
                continue
            try:
                await self._renew()
                await self.publish_record()
            except Exception:
                logger.exception("target=%s renewal failed", self.target)

    def _report(self) -> LoadReport:
        trust = self.trust
        return msgspec.structs.replace(self._source.report(), mode=trust.mode, reason=trust.reason)

    async def _renew(self) -> None:
        epoch = self.epoch
        if epoch is None:
            return
        try:
            renewed = await self._index.renew(
                self.target, epoch, lease_s=self._lease_s, report=self._report()
            )
        except DependencyError as error:
            self._break("FALLBACK", Fault(str(error)))
            return
        if not renewed:
            self._lose_epoch(epoch)

    async def _leave(self) -> None:
        try:
            if self.epoch is not None:
                await self._index.deregister(self.target, self.epoch)
            await self._registry.withdraw(self.target.replica)
        except DependencyError as error:
            logger.warning("target=%s left to its lease: %s", self.target, error)

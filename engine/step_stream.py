"""Keeps a runner behind a border in step with the scheduler: version, sequence, digest of diffs.

A runner's state is a fold of steps, so one that missed a step, or got another one than was sent,
would compute nonsense without noticing. Every frame therefore continues a checksum over all that
came before it. Who is out of step says so, and goes on from a step that assumes nothing. It knows
no transport.
"""

from __future__ import annotations

import zlib

import msgspec

from engine.output import SchedulerOutput
from kvindex.foundation.errors import PrefixFleetError

PROTOCOL_VERSION = 1
"""Changes with the meaning of any field of a step; both ends must have the same."""


class OutOfStepError(PrefixFleetError):
    """Raised when a runner cannot take in a step, nor any later one, until a resync.

    `kv_lost`: the contents of its KV cache, and of its host tier, are gone too.
    """

    def __init__(self, reason: str, *, kv_lost: bool = False) -> None:
        super().__init__(reason)
        self.kv_lost = kv_lost


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """One step on its way; `digest` is the chained CRC-32 of the encoded steps up to this one."""

    version: int
    digest: int
    step: msgspec.Raw


class StepSender:
    """Frames the steps of one scheduler, in order; O(bytes of a step)."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._digest = 0

    def frame(self, step: SchedulerOutput) -> bytes:
        """Return the next frame; a resync starts the digest anew."""
        payload = self._encoder.encode(step)
        self._digest = zlib.crc32(payload, 0 if step.resync else self._digest)
        return self._encoder.encode(_Frame(PROTOCOL_VERSION, self._digest, msgspec.Raw(payload)))


class StepReceiver:
    """Checks and decodes the frames that reach one runner.

    A new runner knows nothing: it can begin with the first step of a scheduler, or with a resync.
    """

    def __init__(self) -> None:
        self._frames = msgspec.msgpack.Decoder(_Frame)
        self._steps = msgspec.msgpack.Decoder(SchedulerOutput)
        self._digest = 0
        self._next_step = 1
        self._is_out_of_step = False

    def take(self, frame: bytes) -> SchedulerOutput:
        """Return the step to compute now; OutOfStepError, from then on until a resync, if none is.

        The error says what was expected and what came.
        """
        try:
            version, digest, payload = msgspec.structs.astuple(self._frames.decode(frame))
            if version != PROTOCOL_VERSION:
                raise OutOfStepError(
                    f"steps have protocol version {version}, this runner knows {PROTOCOL_VERSION}; "
                    "start both from one release"
                )
            step = self._steps.decode(payload)
        except msgspec.DecodeError as error:
            self._is_out_of_step = True
            raise OutOfStepError(f"a step does not decode: {error}") from None
        except OutOfStepError:
            self._is_out_of_step = True
            raise
        self._check(step, payload, digest)
        self._next_step, self._digest, self._is_out_of_step = step.step + 1, digest, False
        return step

    def _check(self, step: SchedulerOutput, payload: msgspec.Raw, digest: int) -> None:
        found = zlib.crc32(payload, 0 if step.resync else self._digest)
        reason = None
        if found != digest:
            reason = f"step {step.step} has digest {digest:08x}, what came adds up to {found:08x}"
        if not step.resync and step.step != self._next_step:
            reason = f"step {step.step} came, step {self._next_step} was expected"
        if not step.resync and self._is_out_of_step:
            reason = f"step {step.step} follows one that was lost"
        if reason is not None:
            self._is_out_of_step = True
            raise OutOfStepError(reason)

"""The last decisions of this gateway, so that each can be explained.

Kept in memory and bounded; nothing of a prompt is in them.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from router.observe.causes import Cause
from router.request.job import AttemptRecord
from router.request.usage import RealisedUsage


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what was decided, and what really happened.

    `at` is in seconds since the Unix epoch; `ttft_s` None when no token came. `unique_id` is what
    replicas logged it under. Of the prompt, `num_predicted_tokens` were cached where it was served,
    `num_available_tokens` where most was; `cause` tells why the realised number (in `usage`) is
    another. `queue_s` it waited for a place; `num_resumes` times its answer went on elsewhere.
    """

    request_id: str
    unique_id: str
    at: float
    tenant: str
    model: str
    status: int
    num_prompt_tokens: int | None
    num_predicted_tokens: int | None
    usage: RealisedUsage | None
    ttft_s: float | None
    duration_s: float
    attempts: list[AttemptRecord]
    gateway: str = ""
    num_available_tokens: int | None = None
    cause: Cause | None = None
    queue_s: float | None = None
    num_resumes: int = 0


class DecisionLog:
    """Records by request id; the oldest make room, and of equal ids the newest is kept."""

    def __init__(self, *, max_records: int) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def add(self, record: DecisionRecord) -> None:
        """Keep a record."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a request, None when it is unknown or too old."""
        return self._records.get(request_id)

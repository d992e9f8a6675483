"""The running requests of a runner: tokens, progress and block tables in arrays.

A request keeps one slot for as long as it runs, so nothing is moved or compacted. It is a fold of
the scheduler's outputs and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.output import NewRequestData
from engine.runner_state import RequestState

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class RequestTable:
    """State of at most `max_num_seqs` requests, indexed by slot.

    Must hold: `num_computed[slot] <= num_tokens[slot]`, and the block tables, one for each of
    `num_groups` cache groups, cover every token that has been scheduled.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        # One more than a sequence may hold: the token sampled from the last position.
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_ids: Int32Array = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.num_blocks: Int64Array = np.zeros((num_groups, max_num_seqs), np.int64)
        self.num_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_computed: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._slot_of: dict[str, int] = {}
        self._free = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self._slot_of)

    def slots(self, request_ids: Sequence[str]) -> Int64Array:
        """Return the slots of running requests, in the order given."""
        return np.array([self._slot_of[request_id] for request_id in request_ids], np.int64)

    def slot(self, request_id: str) -> int:
        """Return the slot of a running request."""
        return self._slot_of[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request; an id that never reached this runner is ignored.

        A request may be finished before the step that would have introduced it.
        """
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget every request."""
        self._free.extend(self._slot_of.values())
        self._slot_of.clear()

    def add(self, request: NewRequestData) -> int:
        """Take in a new (or preempted and resumed) request; return its slot."""
        assert request.request_id not in self._slot_of, f"{request.request_id} runs already"
        slot = self._free.pop()
        self._slot_of[request.request_id] = slot
        num_tokens = len(request.token_ids)
        self.token_ids[slot, :num_tokens] = request.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed[slot] = request.num_computed_tokens
        self.num_blocks[:, slot] = 0
        self._extend(slot, request.block_ids)
        return slot

    def extend(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Append blocks, one list per cache group, to the table of a running request."""
        self._extend(self._slot_of[request_id], block_ids)

    def states(self) -> Iterator[RequestState]:
        """Yield what is known of every request, for a full-state digest; O(all tokens)."""
        for request_id, slot in self._slot_of.items():
            tokens = self.token_ids[slot, : self.num_tokens[slot]].tolist()
            block_ids = [
                self.block_ids[group, slot, :count].tolist()
                for group, count in enumerate(self.num_blocks[:, slot])
            ]
            yield request_id, tokens, block_ids, int(self.num_computed[slot])

    def extend_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append to the prompt of a running request that has no output yet."""
        slot = self._slot_of[request_id]
        start, count = self.num_tokens[slot], len(token_ids)
        self.token_ids[slot, start : start + count] = token_ids
        self.num_tokens[slot] += count
        self.num_prompt_tokens[slot] += count

    def write_drafts(self, slot: int, token_ids: Sequence[int]) -> None:
        """Put guesses behind the known tokens, where the next ones will stand."""
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids

    def append(self, slot: int, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids[slot, self.num_tokens[slot]] = token_id
        self.num_tokens[slot] += 1

    def _extend(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        assert len(block_ids) == len(self.block_ids), "one list of blocks per cache group"
        for group, new in enumerate(block_ids):
            start = self.num_blocks[group, slot]
            self.block_ids[group, slot, start : start + len(new)] = new
            self.num_blocks[group, slot] = start + len(new)

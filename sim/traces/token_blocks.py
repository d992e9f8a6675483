"""From token ids to a trace's hash_ids: the engine's own hash chain, digests numbered as met."""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.hashing import HashScheme, hash_tokens


class TokenBlocks:
    """Numbers the full blocks of prompts; equal numbers mean equal chains of one model."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._scheme = HashScheme(block_size=block_size)
        self._ids: dict[tuple[str | None, bytes], int] = {}

    def ids(
        self, prompt: Sequence[int], output: Sequence[int] | None, *, model: str | None
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the prompt's ids, and those of the further blocks that the output fills.

        The second is None without an output. Raises ValueError for a negative token id.
        """
        chain = hash_tokens([*prompt, *(output or ())], self._scheme)
        ids = tuple(self._ids.setdefault((model, digest), len(self._ids)) for digest in chain)
        num_prompt_blocks = len(prompt) // self._block_size
        return ids[:num_prompt_blocks], None if output is None else ids[num_prompt_blocks:]

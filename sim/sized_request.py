"""An engine request whose tokens nobody knows: lengths and block hashes are enough to schedule it.

A trace has no text, and a list of ids per request would cost more than everything else. What the
scheduler asks of tokens is how many there are; what the cache asks is the hash chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineRequest
from engine.request import Request
from kvindex.hashing import BlockHash, HashChain, HashScheme
from sim.workload import Arrival


class TokenCount(list[int]):
    """Stands for a list of `count` tokens that have no ids; iterating it yields nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_known = count

    def __len__(self) -> int:
        return self.count_known

    def append(self, token_id: int) -> None:
        """Count one more."""
        self.count_known += 1


class NamedChain(HashChain):
    """A hash chain whose blocks were named in advance, instead of being hashed from tokens."""

    __slots__ = ("_names",)

    def __init__(
        self, scheme: HashScheme, names: Sequence[BlockHash], *, num_known_tokens: int
    ) -> None:
        """Start with the full blocks of the known tokens; `names` cover all that may follow."""
        super().__init__(scheme)
        self._names = names
        self.hashes = list(names[: num_known_tokens // scheme.block_size])

    def extend(self, tokens: Sequence[int]) -> None:
        """Name every block of `tokens` that is full and not named yet."""
        num_full = len(tokens) // self._scheme.block_size
        if num_full > len(self.hashes):
            self.hashes += self._names[len(self.hashes) : num_full]


def make_request(
    arrival: Arrival, scheme: HashScheme, *, order: int, num_emitted: int = 0
) -> Request:
    """Build the engine's request; `num_emitted` output tokens were computed elsewhere before."""
    source = EngineRequest(
        request_id=arrival.request_id,
        prompt_token_ids=[],
        sampling=SamplingParams(
            max_tokens=arrival.num_output_tokens, temperature=0.0, ignore_eos=True
        ),
        priority=arrival.priority,
        tenant=arrival.tenant,
        weight=arrival.weight,
    )
    num_known = arrival.num_prompt_tokens + num_emitted
    names = (*arrival.hashes, *arrival.output_hashes)
    return Request(
        source=source,
        arrival=order,
        token_ids=TokenCount(num_known),
        num_prompt_tokens=arrival.num_prompt_tokens,
        chain=NamedChain(scheme, names, num_known_tokens=num_known),
    )

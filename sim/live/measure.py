"""A bounded number of requests to a server that is otherwise idle, and how long they took.

Prompts are token ids that nobody has sent before, so that what is cached is known: nothing at the
first time, what `usage` says at the second. What the times mean is sim/live/fit.py's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from engine.stats import StepRates
from kvindex.foundation.errors import PrefixFleetError
from sim.live.client import LiveClient
from sim.live.fit import Sample, decode_sample, first_token_sample
from sim.live.messages import Completion, Received
from sim.live.prompts import PromptMaker
from sim.live.together import together
from sim.traces.row import TraceHeader, TraceRow

BATCHES = (1, 2, 4, 8, 16)
_SHORTEST_PROMPT = 64
_WARM_UPS = 3
_MIN_INTERVALS = 4
_OWN_TOKENS = 16


class MeasurePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure; lengths in tokens.

    `max_step_tokens` and `max_step_s` (seconds, 0 = none) are the server's own limits of a step.
    """

    model: str
    max_prompt: int = 2048
    repeats: int = 5
    num_output_tokens: int = 24
    max_step_tokens: int = 8192
    max_step_s: float = 0.0
    vocab_size: int
    seed: int

    @property
    def lengths(self) -> list[int]:
        """The prompts' lengths, doubling."""
        lengths = [_SHORTEST_PROMPT]
        while lengths[-1] * 2 <= self.max_prompt:
            lengths.append(lengths[-1] * 2)
        return lengths

    @property
    def contexts(self) -> tuple[int, int]:
        """The prompts' lengths under decoding."""
        return self.lengths[0], self.lengths[-1] // 2

    @property
    def num_requests(self) -> int:
        """How many requests all of it takes."""
        first_tokens = 2 * self.repeats * len(self.lengths)
        return _WARM_UPS + first_tokens + len(self.contexts) * sum(BATCHES)

    def step_tokens(self, speed: float) -> int:
        """Return what the server computes in a step at a speed of so many prompt tokens per second.

        The rule is our engine's; on a slow machine seconds are by far the narrower limit.
        """
        within = StepRates(prefill_tokens_per_s=speed).tokens_within(self.max_step_s)
        return self.max_step_tokens if within is None else min(self.max_step_tokens, within)


class Measurer:
    """Measures one server; `done` is called after each answer."""

    def __init__(self, client: LiveClient, plan: MeasurePlan, done: Callable[[], None]) -> None:
        self._client = client
        self._plan = plan
        self._done = done
        header = TraceHeader(tail="floor")
        self._prompts = PromptMaker(header, vocab_size=plan.vocab_size, seed=plan.seed)
        self._num_prompts = 0

    async def measure(self) -> list[Sample]:
        """Measure everything; raise PrefixFleetError when a request is not answered."""
        for _ in range(_WARM_UPS):
            await self._ask(self._prompt(self._plan.lengths[-1]))
        samples = []
        for length in self._plan.lengths:
            cold, again = [], []
            for _ in range(self._plan.repeats):
                prompt = self._prompt(length)
                cold.append(await self._ask(prompt))
                again.append(await self._ask(prompt))
            samples.append(self._first_token("new", cold))
            samples.append(self._first_token("repeated", again))
        for context in self._plan.contexts:
            shared = self._prompt(context - _OWN_TOKENS)
            for batch in BATCHES:
                sample = await self._decode(shared, batch)
                if sample is not None:
                    samples.append(sample)
        return samples

    def _prompt(self, length: int) -> list[int]:
        self._num_prompts += 1
        row = TraceRow(line=self._num_prompts, arrival_s=0.0, input_length=length, output_length=1)
        return self._prompts.prompt(row)

    async def _ask(self, prompt: list[int], num_output_tokens: int = 1) -> Received:
        received = await self._client.complete(
            Completion(
                model=self._plan.model,
                prompt=prompt,
                num_output_tokens=num_output_tokens,
                seed=self._num_prompts,
            )
        )
        self._done()
        if received.error is not None:
            raise PrefixFleetError(
                f"a prompt of {len(prompt)} tokens was not answered: {received.error}"
            )
        return received

    def _first_token(self, what: str, answers: Sequence[Received]) -> Sample:
        """Take the one of median time among equal requests."""
        seen = [(a.ttft_s, a.num_cached_tokens or 0) for a in answers if a.ttft_s is not None]
        length = answers[0].num_prompt_tokens
        if len(seen) < len(answers) or length is None:
            raise PrefixFleetError("the server sent no token; does it stream completions?")
        ttft_s, found = sorted(seen)[len(seen) // 2]
        cached = min(found, length - 1)
        return first_token_sample(
            f"first token, {length} {what}",
            ttft_s=ttft_s,
            num_prompt_tokens=length,
            num_cached_tokens=cached,
            max_step_tokens=self._plan.step_tokens((length - cached) / ttft_s),
        )

    async def _decode(self, shared: list[int], batch: int) -> Sample | None:
        """Decode a batch of prompts that begin alike, so that they are computed once.

        None when its requests were hardly ever running together.
        """
        context = len(shared) + _OWN_TOKENS
        prompts = [shared + self._prompt(_OWN_TOKENS) for _ in range(batch)]
        answers = await together(self._ask(p, self._plan.num_output_tokens) for p in prompts)
        intervals, positions = _together(answers)
        if len(intervals) < _MIN_INTERVALS:
            return None
        return decode_sample(
            f"next token, {batch} with {context} each",
            interval_s=statistics.median(intervals),
            batch=batch,
            context=batch * (context + statistics.mean(positions)),
        )


def _together(answers: Sequence[Received]) -> tuple[list[float], list[int]]:
    """Return the intervals between tokens while all were decoding, and which tokens they ended."""
    starts = max(a.sent_at + a.token_at[0] for a in answers if a.token_at)
    ends = min(a.sent_at + a.token_at[-1] for a in answers if a.token_at)
    intervals: list[float] = []
    positions: list[int] = []
    for answer in answers:
        instants = [answer.sent_at + at for at in answer.token_at]
        for position in range(1, len(instants)):
            before, after = instants[position - 1], instants[position]
            if before >= starts and after <= ends:
                intervals.append(after - before)
                positions.append(position)
    return intervals, positions

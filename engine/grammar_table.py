"""The grammars of the requests that run, as one more fold of a runner's steps.

A request that comes back after a preemption, or from another replica, brings its output with it,
so its place in the grammar is found again by replaying that. It knows neither logits nor slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.grammar import GrammarBackend, GrammarError, OutputGrammar
from engine.output import NewRequestData


@dataclass(slots=True)
class _Entry:
    source: NewRequestData
    grammar: OutputGrammar | None = None


class GrammarTable:
    """One entry per running request that has a grammar.

    Compiling begins when a request enters, and is waited for when its first token is sampled.
    `backend` None: requests with a grammar fail, each alone.
    """

    def __init__(self, backend: GrammarBackend | None, *, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, request: NewRequestData) -> None:
        """Take in a request that begins or comes back; one without a grammar is left alone."""
        spec = request.sampling.grammar
        if spec is None:
            return
        self._entries[request.request_id] = _Entry(request)
        if self._backend is not None:
            self._backend.prepare(spec)

    def drop(self, request_id: str) -> None:
        """Forget a request; ids without a grammar are ignored."""
        self._entries.pop(request_id, None)

    def clear(self) -> None:
        """Forget every request."""
        self._entries.clear()

    def mask(self, request_id: str) -> bytes:
        """Return which tokens may come next; GrammarError when this request cannot go on."""
        return self._grammar(request_id).mask()

    def valid_prefix(self, request_id: str, drafts: Sequence[int]) -> int:
        """Return how many leading drafts are worth verifying; GrammarError as in `mask`."""
        return self._grammar(request_id).valid_prefix(drafts)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Go on by sampled tokens; ids without a grammar are ignored."""
        if request_id in self._entries:
            self._grammar(request_id).accept(token_ids)

    def _grammar(self, request_id: str) -> OutputGrammar:
        entry = self._entries[request_id]
        if entry.grammar is None:
            entry.grammar = self._begin(entry.source)
        return entry.grammar

    def _begin(self, request: NewRequestData) -> OutputGrammar:
        """Compile, and replay what the request brought."""
        spec = request.sampling.grammar
        assert spec is not None, "an entry without a grammar"
        if self._backend is None:
            raise GrammarError("this engine serves no grammars")
        grammar = OutputGrammar(
            self._backend.compile(spec).matcher(),
            vocab_size=self._vocab_size,
            end_token_ids=(*request.eos_token_ids, *request.sampling.stop_token_ids),
            thinking=spec.thinking,
        )
        grammar.accept(request.token_ids[request.num_prompt_tokens :])
        return grammar

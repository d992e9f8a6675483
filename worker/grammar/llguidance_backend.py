"""The grammar back end over llguidance: JSON schemas, regular expressions, Lark, choices.

It loads llguidance and reads the model's tokenizer when the first grammar comes, in a thread of its
own, and needs no torch. What a request may combine is decided where requests are parsed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.frontend.encoder import Encoder
from engine.frontend.sampling_params import GrammarSpec
from engine.frontend.tokenizer_bundle import TOKENIZER_FILE, TokenizerBundle, load_bundle
from engine.grammar import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger("prefixfleet.worker.grammar")

MAX_CACHED_GRAMMARS = 256
MAX_SOURCE_CHARS = 1 << 20
_NUM_THREADS = 2
_MAX_ERROR_CHARS = 500
_NO_TEXT = "no text of this model's tokens fits the grammar"


class LlguidanceMatcher:
    """A position in a compiled grammar."""

    __slots__ = ("_end_ids", "_inner", "_num_bytes")

    def __init__(self, inner: LLMatcher, end_ids: Sequence[int], num_bytes: int) -> None:
        self._inner = inner
        self._end_ids = end_ids
        self._num_bytes = num_bytes

    @property
    def is_accepting(self) -> bool:
        accepting: bool = self._inner.is_accepting()
        return accepting

    def mask(self) -> bytes:
        if self._inner.is_stopped() and not self._inner.is_error():
            return bytes(self._num_bytes)
        bits = bytearray(self._inner.compute_bitmask()[: self._num_bytes])
        self._check()
        # Also in the midst of a text, where an end token may look like one of its characters.
        for token_id in self._end_ids:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(bits)

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        texts = list(takewhile(lambda token_id: token_id not in self._end_ids, token_ids))
        count: int = self._inner.validate_tokens(texts) if texts else 0
        self._check()
        return count

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._inner.consume_tokens(list(token_ids)):
            self._check()
            raise GrammarError("a token does not fit the grammar")

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise GrammarError(_first_line(self._inner.get_error()))


class LlguidanceGrammar:
    """A compiled grammar; matchers are copies of one that stands at its beginning."""

    def __init__(self, first: LLMatcher, end_ids: Sequence[int], num_bytes: int) -> None:
        self._first = first
        self._end_ids = end_ids
        self._num_bytes = num_bytes

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._first.deep_copy(), self._end_ids, self._num_bytes)


class GrammarTokenizer(msgspec.Struct, frozen=True):
    """What a back end must know of a model: its tokenizer.json as text, and its end tokens."""

    text: str
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def of(bundle: TokenizerBundle, encoder: Encoder) -> GrammarTokenizer:
        """Take it from a loaded tokenizer; ids that are no tokens of it cannot be in any text."""
        ends = (t for t in encoder.eos_token_ids if encoder.token_text(t) is not None)
        return GrammarTokenizer(bundle.files[TOKENIZER_FILE].decode(), tuple(ends))

    @staticmethod
    def read(folder: Path) -> GrammarTokenizer:
        """Read it from a model folder; raises ConfigError."""
        bundle = load_bundle(folder)
        return GrammarTokenizer.of(bundle, Encoder(bundle))


class LlguidanceBackend:
    """Grammars over one model's tokenizer, the last `max_cached` of them kept. Thread-safe.

    `load` is called once, when the first grammar comes. `vocab_size` is the model's.
    """

    def __init__(
        self,
        load: Callable[[], GrammarTokenizer],
        *,
        vocab_size: int,
        max_cached: int = MAX_CACHED_GRAMMARS,
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._num_bytes = (vocab_size + 7) // 8
        self._max_cached = max_cached
        self._compiled: OrderedDict[GrammarSpec, Future[LlguidanceGrammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def prepare(self, spec: GrammarSpec) -> None:
        self._future(spec)

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        try:
            return self._future(spec).result()
        except GrammarError:
            raise
        except Exception as error:
            _log.exception("a grammar could not be compiled kind=%s", spec.kind)
            raise GrammarError("the grammar cannot be compiled") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _future(self, spec: GrammarSpec) -> Future[LlguidanceGrammar]:
        """Find a grammar or begin to compile it; where the thinking ends is not its business."""
        key = msgspec.structs.replace(spec, thinking=None)
        with self._lock:
            future = self._compiled.get(key)
            if future is None:
                future = self._compiled[key] = self._threads.submit(self._compile, key)
                if len(self._compiled) > self._max_cached:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return future

    def _compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        if len(spec.text) > MAX_SOURCE_CHARS:
            raise GrammarError(f"{len(spec.text)} characters; at most {MAX_SOURCE_CHARS} are taken")
        from llguidance import LLMatcher, LLParserLimits

        from worker.grammar.sources import source_of

        tokenizer = self._load_tokenizer()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, source_of(spec), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        grammar = LlguidanceGrammar(matcher, tokenizer.eos_tokens, self._num_bytes)
        # The first mask shows what compiling does not: a start too wide for the limits, or none.
        start = grammar.matcher()
        if not any(start.mask()) and not start.is_accepting:
            raise GrammarError(_NO_TEXT)
        return grammar

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                loaded = self._load()
                try:
                    self._tokenizer = LLTokenizer(
                        loaded.text,
                        n_vocab=self._vocab_size,
                        eos_token=list(loaded.eos_token_ids) or None,
                    )
                except ValueError as error:
                    raise GrammarError(f"this tokenizer takes no grammars: {error}") from None
            return self._tokenizer


def _first_line(error: str) -> str:
    """Shorten an error: what follows it is the state of a parser."""
    error = error.partition("<state>")[0].replace("<non-verbose/>", "")
    if error.startswith("NoExtension"):
        return _NO_TEXT
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return "; ".join(lines)[:_MAX_ERROR_CHARS] or "the grammar cannot be used"

"""What a grammar costs a request: to compile once, and to follow token by token.

    python -m benchmarks.bench_grammar [--quick] [--json] [MODEL_FOLDER]

The tokenizer is the model's own, the text a JSON object of some 60 tokens; no model is run. Masks
are laid on logits of the model's width. Figures are medians.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo_folder import demo_folder
from benchmarks.timing import Report, Row, at_most, flags, machine, median_us, show
from engine.frontend.encoder import Encoder
from engine.frontend.sampling_params import GrammarSpec
from engine.frontend.tokenizer_bundle import load_bundle
from engine.grammar import OutputGrammar
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend
from worker.runner.grammar_rows import ruled

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "born", "tags", "address"],
    "additionalProperties": False,
}
TEXT = (
    '{"name": "Ada Lovelace", "born": "1815-12-10", "tags": ["a", "c"], '
    '"address": {"street": "St James\'s Square", "number": 12}}'
)
_BATCH = 16


class Costs:
    """A back end over one model's tokenizer, and what is measured on it."""

    def __init__(self, folder: Path) -> None:
        bundle = load_bundle(folder)
        self.encoder = Encoder(bundle)
        tokenizer = GrammarTokenizer.of(bundle, self.encoder)
        self.backend = LlguidanceBackend(
            lambda: tokenizer, vocab_size=self.encoder.vocab_size, max_cached=4096
        )
        self.tokens = self.encoder.encode(TEXT, add_special_tokens=False)
        self._num_schemas = 0

    def first_grammar_s(self) -> float:
        """Return how long the very first grammar takes: the tokenizer is read for it."""
        started = time.perf_counter()
        self.compile_new()
        return time.perf_counter() - started

    def compile_new(self) -> OutputGrammar:
        """Compile a schema that was not seen before."""
        self._num_schemas += 1
        return self.output({**SCHEMA, "title": str(self._num_schemas)})

    def output(self, schema: dict[str, Any]) -> OutputGrammar:
        """Stand at the beginning of a schema."""
        grammar = self.backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
        return OutputGrammar(
            grammar.matcher(),
            vocab_size=self.encoder.vocab_size,
            end_token_ids=self.encoder.eos_token_ids,
        )

    def walk(self) -> None:
        """Fill a mask before each token of the text, and accept the token."""
        output = self.output(SCHEMA)
        for token_id in self.tokens:
            output.mask()
            output.accept([token_id])

    def replay(self) -> None:
        """Find the place behind the whole text again, as after a preemption."""
        self.output(SCHEMA).accept(self.tokens)


def measure(folder: Path, *, repeat: int) -> list[Row]:
    """Return all rows."""
    costs = Costs(folder)
    first_s = costs.first_grammar_s()
    logits = torch.randn(_BATCH, costs.encoder.vocab_size)
    masks = {row: costs.output(SCHEMA).mask() for row in range(_BATCH)}
    num_tokens = len(costs.tokens)
    return [
        Row(name="first grammar, with the tokenizer", ours=first_s * 1e3, unit="ms"),
        at_most("compile a schema", median_us(costs.compile_new, repeat=repeat) / 1e3, "ms", 20),
        at_most(
            "mask and accept, per token",
            median_us(costs.walk, repeat=repeat) / num_tokens,
            "us",
            500,
        ),
        at_most("replay, per token", median_us(costs.replay, repeat=repeat) / num_tokens, "us", 50),
        Row(
            name=f"masks on the logits of {_BATCH} rows",
            ours=median_us(lambda: ruled(logits, masks), repeat=repeat) / 1e3,
            unit="ms",
        ),
        Row(
            name=f"the largest logit of {_BATCH} rows, to compare",
            ours=median_us(lambda: logits.argmax(dim=-1), repeat=repeat) / 1e3,
            unit="ms",
        ),
    ]


def main() -> int:
    """Measure and print."""
    parser = flags("What a grammar costs a request.")
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.model or demo_folder(), repeat=30 if arguments.quick else 300)
    report = Report(
        claim="a grammar is followed in microseconds per token and compiled in milliseconds",
        machine=machine(),
        settings={"text_characters": len(TEXT), "threads": 1},
        rows=rows,
    )
    show(report, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rebuilds a Hugging Face tokenizer from what a GGUF file says of it.

Byte-level BPE with SmolLM's pre-tokenizer only: digits one by one, then GPT-2's pattern. Other
pre-tokenizers split text differently and are refused rather than approximated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvindex.foundation.errors import ConfigError

_CONTROL = int(gguf.TokenType.CONTROL)


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from GGUF metadata by key.

    Raises ConfigError when the metadata describes another kind of tokenizer.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ConfigError(f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    build_tokenizer(
        tokens, fields["tokenizer.ggml.merges"], fields["tokenizer.ggml.token_type"]
    ).save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    config = {name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_tokenizer(tokens: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    """Assemble the tokenizer; merges are "left right", control tokens become special tokens."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer

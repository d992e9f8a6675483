"""Text to token ids and back, by the model's own tokenizer.json.

It knows the model's special tokens and limits as its files state them. It deliberately knows no
chat template (prompt.py) and no streaming (detokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from engine.frontend.errors import RequestError
from engine.frontend.segments import SegmentCache, check_num_new, cut_pattern
from engine.frontend.token_bytes import TokenBytes
from engine.frontend.tokenizer_bundle import (
    GENERATION_CONFIG_FILE,
    MODEL_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TokenizerBundle,
)
from engine.frontend.words import word_table
from kvindex.foundation.errors import ConfigError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class Encoder:
    """A loaded tokenizer. Thread-safe; encoding releases the interpreter lock.

    `special_tokens` maps names such as `bos_token` to their text. `eos_token_ids` are all tokens
    that end a generation. `max_model_len` is what config.json says, None if it says nothing.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        """Load a bundle; raise ConfigError when a file of it cannot be used."""
        try:
            self._tokenizer = Tokenizer.from_buffer(bundle.files[TOKENIZER_FILE])
        except ValueError as error:
            raise ConfigError(f"{TOKENIZER_FILE}: {error}") from None
        self._token_bytes = TokenBytes(bundle.files[TOKENIZER_FILE])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        pattern = cut_pattern(bundle.files[TOKENIZER_FILE])
        self._segments = None if pattern is None else SegmentCache(pattern, self._encode_new)
        self._words = word_table(bundle.files[TOKENIZER_FILE], self._encode_each)
        config = bundle.json(MODEL_CONFIG_FILE)
        text_config = config.get("text_config", config)
        self.special_tokens = _special_tokens(bundle.json(TOKENIZER_CONFIG_FILE))
        self.eos_token_ids = self._eos_token_ids(bundle, text_config)
        self.max_model_len: int | None = text_config.get("max_position_embeddings")
        # Rows of the embedding: a model may have more than its tokenizer has tokens.
        self.vocab_size: int = text_config.get("vocab_size") or self._tokenizer.get_vocab_size()
        self._max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        param: str = "prompt",
        scope: str | None = None,
        max_new_chars: int | None = None,
    ) -> list[int]:
        """Return the token ids of a text.

        With `max_tokens`, a text that is too long for any tokenization to fit is refused with
        `context_length_exceeded` before the work is done; `param` names the text's field. With a
        `scope`, parts that were encoded in it before are looked up, where no tokens are added. If
        more than `max_new_chars` characters are left to encode, raises TooMuchToEncodeError.
        """
        if max_tokens is not None and len(text) > max_tokens * self._max_token_chars:
            raise RequestError(
                "context_length_exceeded",
                f"this model's context length is {max_tokens} tokens; a text of {len(text)} "
                "characters cannot fit; shorten the prompt",
                param=param,
            )
        if scope is not None and self._segments is not None and not add_special_tokens:
            return self._segments.encode(text, scope=scope, max_new_chars=max_new_chars)
        check_num_new(len(text), max_new_chars)
        # The batch call is the one that releases the interpreter lock.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def _encode_new(self, texts: Sequence[str], max_new_chars: int | None) -> list[list[int]]:
        if self._words is not None:
            return self._words.encode(texts, max_new_chars=max_new_chars)
        check_num_new(sum(map(len, texts)), max_new_chars)
        return self._encode_each(texts)

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids ""."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """Return the token that the vocabulary writes so, None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def token_text(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, None for an id without a token."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, b"" for an id without a token."""
        return self._token_bytes.of(token_id, self.token_text(token_id))

    def _eos_token_ids(self, bundle: TokenizerBundle, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Collect the end tokens of generation_config.json (else config.json) and tokenizer."""
        stated = bundle.json(GENERATION_CONFIG_FILE).get("eos_token_id")
        if stated is None:
            stated = config.get("eos_token_id")
        ids = [stated] if isinstance(stated, int) else list(stated or ())
        eos_token = self.special_tokens.get("eos_token")
        own = self._tokenizer.token_to_id(eos_token) if eos_token is not None else None
        if own is not None and own not in ids:
            ids.append(own)
        return tuple(ids)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read the named special tokens, written as text or as an object with `content`."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens

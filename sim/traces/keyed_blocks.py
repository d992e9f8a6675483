"""What a recording keeps of a prompt: its length, and ids of its blocks under a throw-away key.

The key is made for one recording and lives in its process only, so nobody can later test a text
against the ids, not even who made the recording. Without a tokenizer, blocks are cut from the
bytes of the request, four to a token: where prompts agree is then right, lengths are not.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.frontend.errors import RequestError
from sim.traces.formats.openai_log import LoggedBody, tokenize
from sim.traces.row import TraceHeader

if TYPE_CHECKING:
    from engine.frontend.prompt import PromptEncoder

BYTES_PER_TOKEN = 4
_KEY_BYTES = 32
_ID_BYTES = 8


class RawBody(msgspec.Struct, frozen=True):
    """The fields of a request that make its prompt, as the client wrote them."""

    model: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"")
    messages: tuple[msgspec.Raw, ...] | None = None
    prompt: str | list[str | int | list[int]] | None = None


class KeyedPrompt(NamedTuple):
    """A prompt's length in tokens and the ids of its full blocks."""

    input_length: int
    hash_ids: tuple[int, ...]


class KeyedBlocks:
    """Cuts prompts into blocks; equal ids mean equal prefixes within this recording."""

    def __init__(
        self,
        *,
        block_size: int,
        prompts: PromptEncoder | None = None,
        key: bytes | None = None,
    ) -> None:
        """Take a model's tokenizer, if there is one; the key is random unless a test gives it."""
        self._block_size = block_size
        self._prompts = prompts
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key

    def header(self) -> TraceHeader:
        """Return the header of a trace of such blocks."""
        return TraceHeader(
            block_size=self._block_size,
            lengths="exact" if self._prompts is not None else "approximate",
            source="recorded by prefixfleet trace record",
        )

    def prompts_of(self, body: bytes) -> list[KeyedPrompt]:
        """Return the prompts of a request body; slow, so not for an event loop.

        Raises msgspec.DecodeError or RequestError for a body without a prompt that can be read.
        """
        if self._prompts is not None:
            logged = msgspec.json.decode(body, type=LoggedBody)
            return [self._tokens(logged.model, ids) for ids in tokenize(logged, self._prompts)]
        raw = msgspec.json.decode(body, type=RawBody)
        if raw.messages is not None:
            text = bytes(raw.tools) + b"".join(raw.messages)
            return [self._keyed(raw.model, text, unit_bytes=BYTES_PER_TOKEN)]
        return [self._untokenized(raw.model, prompt) for prompt in _single_prompts(raw.prompt)]

    def _untokenized(self, model: str, prompt: str | list[int]) -> KeyedPrompt:
        if isinstance(prompt, str):
            return self._keyed(model, prompt.encode(), unit_bytes=BYTES_PER_TOKEN)
        return self._tokens(model, prompt)

    def _tokens(self, model: str, token_ids: list[int]) -> KeyedPrompt:
        return self._keyed(model, array("q", token_ids).tobytes(), unit_bytes=_ID_BYTES)

    def _keyed(self, model: str, data: bytes, *, unit_bytes: int) -> KeyedPrompt:
        ids = tuple(self._chain(model, data, self._block_size * unit_bytes))
        return KeyedPrompt(len(data) // unit_bytes, ids)

    def _chain(self, model: str, data: bytes, block_bytes: int) -> Iterator[int]:
        parent = hashlib.blake2b(model.encode(), key=self._key, digest_size=_ID_BYTES).digest()
        for start in range(0, len(data) - block_bytes + 1, block_bytes):
            block = data[start : start + block_bytes]
            parent = hashlib.blake2b(parent + block, key=self._key, digest_size=_ID_BYTES).digest()
            # 63 bits: a signed integer for whoever reads the file.
            yield int.from_bytes(parent, "big") >> 1


def _single_prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """Take apart a field that may hold one prompt or several, as text or as token ids."""
    if prompt is None:
        raise RequestError("invalid_request", "the body has neither messages nor prompt")
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [part for part in prompt if isinstance(part, int)]
    return [token_ids] if token_ids else [part for part in prompt if not isinstance(part, int)]


class Pseudonyms:
    """Numbers for names that must not be written down, in the order in which they appear."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._numbers: dict[str, int] = {}

    def of(self, name: str | None) -> str | None:
        """Return "kind-N", None for None."""
        if name is None:
            return None
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        return f"{self._kind}-{number}"

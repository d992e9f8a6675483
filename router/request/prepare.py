"""From a body to token ids and block hashes: once per request, and never on the event loop.

It knows one model's encoder and hash scheme at a time, and nothing of replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from engine.frontend.openai import ChatCompletionRequest, CompletionRequest
from engine.frontend.params import num_prompt_logprobs, requested_max_tokens, resolve_max_tokens
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.prompt import PromptEncoder
from engine.frontend.segments import TooMuchToEncodeError
from kvindex.hashing import Adapter, BlockHash, HashScheme
from router.request.body import Endpoint
from router.request.known_chains import KnownChains
from router.request.text_chain import BLOCK_BYTES

T = TypeVar("T")

CHARS_PER_TOKEN = 4
"""The usual estimate where no tokenizer is at hand; it weighs load, it is never reported."""

_WAITING_PER_THREAD = 64
_SHORT_BYTES = 16 * 1024
"""A body that is parsed, rendered and hashed within half a millisecond."""
_FEW_CHARS = 400
"""What is encoded in about 100 us, which is what handing work to a thread and back takes."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request in tokens. `prompts` is empty where no tokenizer was at hand.

    `hashes` are those of the first prompt; `num_total_tokens` is the longest prompt and the output
    that was asked for. `block_size` is the number of tokens that each hash stands for.
    """

    prompts: list[list[int]] = []
    hashes: tuple[bytes, ...] = ()
    block_size: int
    num_prompt_tokens: int
    num_total_tokens: int


class Preparer:
    """Runs preparation on a bounded pool of threads, with a bounded line before it."""

    def __init__(self, executor: Executor, *, num_threads: int) -> None:
        self._executor = executor
        self._chains = KnownChains()
        self._line = asyncio.Semaphore(num_threads * _WAITING_PER_THREAD)

    async def prepare(
        self,
        body: bytes,
        endpoint: Endpoint,
        *,
        encoder: PromptEncoder | None,
        max_model_len: int | None,
        scheme: HashScheme,
        cache_salt: str,
        adapter: Adapter | None = None,
    ) -> Prepared:
        """Check, render, tokenize and hash a request; raise RequestError naming what is wrong.

        Short ones of which little is new are prepared at once: a thread would cost more than that.
        """
        if encoder is None:
            return await self.run(partial(_estimated, body, endpoint))
        encode = partial(
            _encode,
            encoder=encoder,
            max_model_len=max_model_len,
            block_size=scheme.block_size,
            chain_of=partial(
                self._chains.hash_tokens, scheme=scheme, cache_salt=cache_salt, adapter=adapter
            ),
            scope=cache_salt,
        )
        if len(body) > _SHORT_BYTES:
            return await self.run(lambda: encode(_read(body, endpoint, encoder)))
        asked = _read(body, endpoint, encoder)
        try:
            return encode(asked, max_new_chars=_FEW_CHARS)
        except TooMuchToEncodeError:
            return await self.run(partial(encode, asked))

    async def run(self, action: Callable[[], T]) -> T:
        """Do other work on texts in the same line."""
        async with self._line:
            return await asyncio.get_running_loop().run_in_executor(self._executor, action)


def estimate(
    body: bytes, *, num_output_tokens: int | None, hashes: tuple[bytes, ...] = ()
) -> Prepared:
    """Guess the size of a request whose tokens nobody here can count; `hashes` of its text."""
    return Prepared(
        hashes=hashes,
        block_size=BLOCK_BYTES // CHARS_PER_TOKEN,
        num_prompt_tokens=max(1, len(body) // CHARS_PER_TOKEN),
        num_total_tokens=num_output_tokens or 1,
    )


class _Asked(NamedTuple):
    """A checked request; `text` is its conversation, written as the model's template wants it."""

    request: ChatCompletionRequest | CompletionRequest
    text: str = ""


def _parse(body: bytes, endpoint: Endpoint) -> ChatCompletionRequest | CompletionRequest:
    if endpoint == "chat/completions":
        return parse_chat_request(body)
    return parse_completion_request(body)


def _estimated(body: bytes, endpoint: Endpoint) -> Prepared:
    return estimate(body, num_output_tokens=requested_max_tokens(_parse(body, endpoint)))


def _read(body: bytes, endpoint: Endpoint, encoder: PromptEncoder) -> _Asked:
    request = _parse(body, endpoint)
    if isinstance(request, ChatCompletionRequest):
        return _Asked(request, encoder.text_of(request))
    return _Asked(request)


def _encode(
    asked: _Asked,
    *,
    encoder: PromptEncoder,
    max_model_len: int | None,
    block_size: int,
    chain_of: Callable[[list[int]], list[BlockHash]],
    scope: str,
    max_new_chars: int | None = None,
) -> Prepared:
    request, requested = asked.request, requested_max_tokens(asked.request)
    if isinstance(request, ChatCompletionRequest):
        prompts = [
            encoder.encode_chat(request, asked.text, scope=scope, max_new_chars=max_new_chars)
        ]
    else:
        # Several short ones may be as long as one: they share what a thread saves.
        each = None if max_new_chars is None else max_new_chars // len(request.prompts)
        prompts = encoder.completion(request, max_new_chars=each)
    longest = max(map(len, prompts))
    hashes = chain_of(prompts[0])
    if len(prompts) > 1:
        # The engine computes the last token of each prompt; the planner sees only their sum.
        del hashes[(len(prompts[0]) - 1) // block_size :]
    if num_prompt_logprobs(request) is not None:
        hashes.clear()  # Its prompt is scored, so engines compute all of it, cached or not.
    if max_model_len is not None:
        resolve_max_tokens(
            requested,
            num_prompt_tokens=longest,
            max_model_len=max_model_len,
            param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
        )
    return Prepared(
        prompts=prompts,
        hashes=tuple(hashes),
        block_size=block_size,
        num_prompt_tokens=sum(map(len, prompts)),
        num_total_tokens=longest + (requested or 1),
    )
